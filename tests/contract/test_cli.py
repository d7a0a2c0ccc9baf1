"""The command line as users script it: commands, options, exit codes and what goes to stderr."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from breakgraph import __version__
from breakgraph.cli import env, main
from breakgraph.errors import UnknownNameError

# Adding an option is a decision: it is written down here.
ENGINE = """
    --attention --block-size --cache-dir --decode-backend --decode-buckets --device --dtype --fusion
    --gpu-memory-utilization
    --load-format --max-model-len --max-num-batched-tokens --max-num-seqs --model --no-enable-prefix-caching
    --num-gpu-blocks-override --prefill-backend --prefill-buckets --prefill-request-slots --seed --verify
"""
BENCH = "--attention --backends --device --dtype --fusion --model --out --peers --rounds --seed"
SAMPLING = """
    --frequency-penalty --ignore-eos --logprobs --max-tokens --min-p --n --presence-penalty --prompt-logprobs
    --repetition-penalty --stop --stop-token-ids --temperature --top-k --top-p
"""
HTTP = "--api-key --json --max-tokens --mix --prompt-spread --prompt-words --rate --shared --url"
SERVER = """
    --api-key --drain-timeout --host --max-waiting --port --ray-address --replicas --request-timeout --served-model-name
"""
OPTIONS = {
    "bench": "kind",
    "bench capture": f"""
        --decode-buckets --max-model-len --no-compare --max-num-batched-tokens --max-num-seqs --prefill-buckets {BENCH}
    """,
    "bench decode": f"--batch --context {BENCH}",
    "bench prefill": f"--requests --tokens {BENCH}",
    "bench serve": f"""
        --answer-len --max-num-batched-tokens --max-num-seqs --num-requests --prompt-len {BENCH} {HTTP}
    """,
    "capture": f"--explain --memory --trace {ENGINE}",
    "demo": "--cache-dir --device",
    "env": "--json",
    "generate": f"--chat --json --prompt --prompt-token-ids {SAMPLING} {ENGINE}",
    "report": "files --format --out",
    "serve": f"{SERVER} {ENGINE}",
    "verify": f"--json {ENGINE.replace('--verify', '')}",
}


def subcommands(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, argparse.ArgumentParser]:
    """Those of subcommands too, by all words of each."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= {f"{prefix}{name}": child, **subcommands(child, f"{prefix}{name} ")}
    return found


def arguments_of(parser: argparse.ArgumentParser) -> list[str]:
    """Each option by its longest name, each positional by its own."""
    return sorted(max(action.option_strings, key=len, default=action.dest) for action in parser._actions)


def test_options_are_frozen() -> None:
    frozen = {name: sorted(["--help", *options.split()]) for name, options in OPTIONS.items()}
    assert {name: arguments_of(parser) for name, parser in subcommands(main.build_parser()).items()} == frozen


def test_commands_are_sorted_and_have_help() -> None:
    assert list(main.COMMANDS) == sorted(main.COMMANDS)
    listing = main.build_parser().format_help()
    assert all(f"    {name} " in listing for name in main.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"breakgraph {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["env", "--no-such-option"], ["env", "--js"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    assert "usage: breakgraph" in capsys.readouterr().err


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(args: argparse.Namespace) -> int:
        raise error

    command = SimpleNamespace(add_parser=env.add_parser, run=run)
    monkeypatch.setattr(main, "COMMANDS", ("env",))
    monkeypatch.setattr(main, "_command", lambda name: command)
    return main.main(["env"])


def test_a_refusal_is_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = UnknownNameError("backend", "fast", ["eager", "full"], "Choose\none of them")
    assert run_raising(error, monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.err == "breakgraph: unknown backend 'fast'; known: eager, full. Choose one of them\n"
    assert printed.out == ""


def test_interrupt_is_one_line_and_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_raising(ZeroDivisionError(), monkeypatch)


def test_the_exit_code_of_a_command_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "run", lambda args: 3)
    assert main.main(["env"]) == 3

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.cli.main import main
from breakgraph.engine.outputs import RequestOutput

GREEDY = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def answers(llama_folder: Path) -> dict[str, str]:
    """What the Python API says to the same prompts."""
    prompts = ["hello", "once", "<user>hello="]
    options = {"prefill_backend": "eager", "decode_backend": "eager", "max_model_len": 64}
    with LLM(str(llama_folder), device="cpu", **options) as llm:
        outputs: list[RequestOutput] = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
        )
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


def test_one_prompt_prints_its_answer_alone(
    model_args: list[str], answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "hello", *GREEDY, *model_args]) == 0
    assert capsys.readouterr().out == answers["hello"] + "\n"


def test_several_prompts_are_numbered(
    model_args: list[str], answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "hello", "--prompt", "once", *GREEDY, *model_args]) == 0
    expected = f"--- 1 of 2\n{answers['hello']}\n--- 2 of 2\n{answers['once']}\n"
    assert capsys.readouterr().out == expected


def test_chat_goes_through_the_template(
    model_args: list[str], answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--chat", "hello", *GREEDY, *model_args]) == 0
    assert capsys.readouterr().out == answers["<user>hello="] + "\n"


def test_standard_input_is_the_prompt_when_there_is_no_other(
    model_args: list[str],
    answers: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["generate", *GREEDY, *model_args]) == 0
    assert capsys.readouterr().out == answers["hello"] + "\n"


def test_json_is_one_object_with_outputs_and_stats(
    model_args: list[str], answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "hello", "--json", *GREEDY, *model_args]) == 0
    printed = json.loads(capsys.readouterr().out)
    (output,) = printed["outputs"]
    assert output["prompt"] == "hello"
    assert output["outputs"][0]["text"] == answers["hello"]
    assert output["outputs"][0]["finish_reason"] == "length"
    assert printed["stats"]["runners"]["prefill"]["num_replays_by_bucket"] == {"16": 1}
    assert printed["stats"]["runners"]["decode"]["num_replays_by_bucket"] == {"2": 5}


def test_random_weights_answer_in_token_ids(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--load-format", "dummy", "--prompt-token-ids", "1,2,3", *GREEDY, *model_args]
    assert main(argv) == 0
    first = capsys.readouterr().out
    assert len(first.strip().split(",")) == 6
    assert main(argv) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", ""], "a prompt needs one token at least"),
        (["--prompt", "x" * 64], "max_model_len=64 leaves room"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens must be an integer >= 1, got 0"),
        (["--prompt", "x", "--max-model-len", "1000"], "max_model_len=1000 is beyond the 512 positions"),
        (["--prompt", "x", "--prefill-backend", "fast"], "unknown backend 'fast'; known: "),
        (["--prompt", "x", "--model", "/no/such/folder"], "no model at '/no/such/folder'"),
        (["--prompt", "x", "--load-format", "dummy"], "give the prompt as --prompt-token-ids 1,2,3"),
        (["--prompt-token-ids", "96"], "token id 96 is not in the vocabulary"),
    ],
)
def test_what_cannot_be_done_is_one_line_on_stderr(
    model_args: list[str], argv: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *model_args, *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("breakgraph: ")
    assert message in last
    assert "Traceback" not in err


def test_a_terminal_without_a_prompt_is_told_what_to_give(
    model_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["generate", *model_args]) == 2
    assert "no prompt: give --prompt, --chat or --prompt-token-ids" in capsys.readouterr().err


def test_two_kinds_of_prompt_at_once_are_refused(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--prompt", "a", "--chat", "b", *model_args])
    assert "not allowed with argument" in capsys.readouterr().err

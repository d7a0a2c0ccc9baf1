"""`breakgraph bench serve`: the options of its two ways, and what happens to one given in the wrong way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from breakgraph.bench.config import ServeBench
from breakgraph.cli.main import main
from breakgraph.server.load import Load

URL = ["--url", "http://127.0.0.1:8000"]
BOTH = ["--num-requests", "--out", "--seed"]
OFFLINE = [
    "--answer-len",
    "--attention",
    "--backends",
    "--device",
    "--dtype",
    "--fusion",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--model",
    "--peers",
    "--prompt-len",
    "--rounds",
]
HTTP = ["--api-key", "--json", "--max-tokens", "--mix", "--prompt-spread", "--prompt-words", "--rate", "--shared"]
VALUES = {"--backends": "full", "--peers": "none", "--mix": "alpaca"}
"""The other options take 1, but for --json."""


class StopHere(Exception):
    """The configuration is known; nothing is run."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What either way was asked for. The measurement itself is left out."""
    found: list[Any] = []

    def stop(config: Any, *rest: object, **options: object) -> None:
        found.append(config)
        raise StopHere

    monkeypatch.setattr("breakgraph.bench.run.run_bench", stop)
    monkeypatch.setattr("breakgraph.server.drive.run_load", stop)
    return found


def config_of(argv: list[str], asked: list[Any]) -> Any:
    with pytest.raises(StopHere):
        main(["bench", "serve", *argv])
    return asked.pop()


def test_url_says_which_way(asked: list[Any]) -> None:
    assert config_of([], asked) == ServeBench()
    assert config_of(URL, asked) == Load(url=URL[1])


def test_options_of_both_keep_the_defaults_of_each_way(asked: list[Any]) -> None:
    assert (config_of([], asked).num_requests, config_of(URL, asked).num_requests) == (256, 100)
    both = ["--num-requests", "7", "--seed", "3"]
    assert config_of(both, asked) == ServeBench(num_requests=7, seed=3)
    assert config_of([*both, *URL], asked) == Load(url=URL[1], num_requests=7, seed=3)


def test_options_of_each_way_arrive(asked: list[Any]) -> None:
    offline = ["--prompt-len", "5", "--backends", "eager,full", "--max-num-seqs", "2"]
    assert config_of(offline, asked) == ServeBench(prompt_len=5, backends=("eager", "full"), max_num_seqs=2)
    http = [*URL, "--rate", "0.5", "--mix", "alpaca", "--max-tokens", "9"]
    assert config_of(http, asked) == Load(url=URL[1], rate=0.5, mix="alpaca", max_tokens=9)


@pytest.mark.parametrize("flag", OFFLINE)
def test_an_offline_option_is_refused_with_url(
    flag: str, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert main(["bench", "serve", *URL, flag, VALUES.get(flag, "1"), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"breakgraph: bench serve: only the offline benchmark has {flag}, and --url asks for load over HTTP; leave out "
        f"--url, or leave out {flag}\n"
    )
    assert (asked, out.exists()) == ([], False)


@pytest.mark.parametrize("flag", HTTP)
def test_an_option_over_http_is_refused_without_url(
    flag: str, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, value = tmp_path / "result.json", [] if flag == "--json" else [VALUES.get(flag, "1")]
    assert main(["bench", "serve", flag, *value, "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"breakgraph: bench serve: only load over HTTP has {flag}, and without --url this is the offline benchmark; "
        f"add the server's address, as in --url http://127.0.0.1:8000, or leave out {flag}\n"
    )
    assert (asked, out.exists()) == ([], False)


def test_a_refusal_names_every_option_of_the_other_way(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    # Given with their defaults, which makes no difference.
    assert main(["bench", "serve", *URL, "--prompt-len", "1000", "--rate", "2", "--rounds", "3"]) == 2
    assert "the offline benchmark has --rounds, --prompt-len, and" in capsys.readouterr().err
    assert main(["bench", "serve", "--prompt-len", "9", "--json", "--rate", "4.0"]) == 2
    assert "load over HTTP has --rate, --json, and" in capsys.readouterr().err
    assert asked == []


def test_the_help_shows_the_options_of_each_way_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "serve", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    groups = {title: sorted(re.findall(r"^  (--[a-z-]+)", body, re.MULTILINE)) for title, body in sections(text)}
    assert groups == {
        "options": [],
        "options of both": sorted(BOTH),
        "HTTP options": sorted(["--url", *HTTP]),
        "offline options": sorted(OFFLINE),
    }
    flat = " ".join(text.split())
    assert "requests in all (default: 100); offline, requests, all there from the start (default: 256)" in flat


def sections(text: str) -> list[tuple[str, str]]:
    """Title and body of each group of a help."""
    found = re.split(r"^([\w ]*options[\w ]*):$", text, flags=re.MULTILINE)
    return list(zip(found[1::2], found[2::2], strict=True))

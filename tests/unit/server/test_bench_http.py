"""Load over HTTP: what is sent, and what comes of the times that clients saw."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph.bench.result import read_result
from breakgraph.cli.main import main
from breakgraph.errors import ConfigError
from breakgraph.server import drive
from breakgraph.server.load import (
    Load,
    Trace,
    answer_lengths,
    arrival_times,
    graph_use,
    make_prompts,
    percentiles,
    summary,
)
from unit.server.conftest import RunningServer

SMALL = ["--num-requests", "12", "--rate", "0", "--prompt-words", "3", "--shared", "0", "--prompt-spread", "0.3"]


def test_arrivals_are_poisson() -> None:
    times = arrival_times(Load(num_requests=4000, rate=5.0))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 5, rel=0.05)
    # of an exponential distribution: 1 - 1/e of the gaps are below the mean
    assert sum(gap < 1 / 5 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert arrival_times(Load(num_requests=3, rate=0)) == [0.0] * 3


def test_prompts_have_the_median_asked_for_and_share_their_beginnings() -> None:
    load = Load(num_requests=1000, prompt_words=40, prompt_spread=0.8, shared=0.3)
    prompts = make_prompts(load)
    assert prompts == make_prompts(load) != make_prompts(Load(num_requests=1000, prompt_words=40, seed=1))
    lengths = [len(prompt.split()) for prompt in prompts]
    beginnings = {tuple(prompt.split()[:200]) for prompt, length in zip(prompts, lengths, strict=True) if length > 200}
    counts = [sum(tuple(prompt.split()[:200]) == beginning for prompt in prompts) for beginning in beginnings]
    shared = sum(count for count in counts if count > 1)
    assert shared / 1000 == pytest.approx(0.3, abs=0.05)
    own = sorted(length if length <= 200 else length - 200 for length in lengths)
    assert own[500] == pytest.approx(40, rel=0.1)
    assert {len(prompt.split()) for prompt in make_prompts(Load(prompt_spread=0, shared=0))} == {60}


def test_a_mix_has_the_means_of_its_data_set() -> None:
    load = Load(num_requests=20_000, mix="sharegpt", shared=0, max_tokens=100_000)
    words = [len(prompt.split()) for prompt in make_prompts(load)]
    assert sum(words) / 20_000 == pytest.approx(161.31, rel=0.03)
    answers = answer_lengths(load)
    assert sum(answers) / 20_000 == pytest.approx(337.99, rel=0.03)
    assert sorted(answers)[10_000] == pytest.approx(337.99 * math.exp(-0.5), rel=0.03)
    assert max(answer_lengths(Load(mix="sharegpt", max_tokens=50))) == 50
    assert answer_lengths(Load(num_requests=3, max_tokens=7)) == [7, 7, 7]
    with pytest.raises(ConfigError, match="unknown mix 'wikipedia'; known: alpaca, sharegpt"):
        Load(mix="wikipedia")


def test_a_summary_of_known_times() -> None:
    traces = [
        Trace(1.0, [1.5, 1.6, 1.9], num_prompt_tokens=10, num_tokens=3),
        Trace(2.0, [2.1], num_prompt_tokens=5, num_tokens=1),
        Trace(2.0, [], error="status 429"),
        Trace(2.0, [2.5], num_tokens=9, error="request_timeout"),
    ]
    found = summary(traces, took_sec=4.0)
    assert (found["num_answered"], found["num_prompt_tokens"], found["num_generated_tokens"]) == (2, 15, 4)
    assert found["num_failed_by_reason"] == {"status 429": 1, "request_timeout": 1}
    assert (found["requests_per_sec"], found["generated_tokens_per_sec"]) == (0.5, 1.0)
    assert found["ttft_ms"] == pytest.approx({"p50": 100.0, "p99": 500.0})
    assert found["tpot_ms"] == pytest.approx({"p50": 200.0, "p99": 200.0})
    assert found["itl_ms"] == pytest.approx({"p50": 100.0, "p99": 300.0})


def test_percentiles_by_nearest_rank() -> None:
    assert percentiles([number / 1e3 for number in range(1, 101)]) == pytest.approx({"p50": 50.0, "p99": 99.0})
    assert percentiles([]) is None


def test_graph_use_is_what_came_between() -> None:
    before = {"phases": [{"phase": "prefill", "num_replays": 2, "num_eager_steps": 1}]}
    after = {"phases": [{"phase": "prefill", "num_replays": 5, "num_eager_steps": 2}]}
    assert graph_use(before, after) == {"prefill": {"num_replays": 3, "num_eager_steps": 1, "hit_rate": 0.75}}
    assert graph_use(after, after)["prefill"]["hit_rate"] is None


def test_graph_use_of_replicas_is_that_of_all_that_are_left() -> None:
    def state(**num_replays: int) -> dict[str, Any]:
        return {
            "replicas": [
                {"replica": name, "phases": [{"phase": "decode", "num_replays": count, "num_eager_steps": 1}]}
                for name, count in num_replays.items()
            ]
        }

    found = graph_use(state(stays=4, dies=50), state(stays=6, comes=7))
    assert found == {"decode": {"num_replays": 9, "num_eager_steps": 1, "hit_rate": 0.9}}


@pytest.mark.parametrize("options", [{"num_requests": 0}, {"rate": -1.0}, {"shared": 1.5}, {"max_tokens": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Load(**options)


def test_it_drives_a_server_and_says_what_it_saw(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "serve", "--url", server.url, *SMALL, "--max-tokens", "5"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_answered"], found["num_failed_by_reason"]) == (12, {})
    assert found["num_generated_tokens"] == 60
    assert found["load"]["num_requests"] == 12
    assert all(found[name]["p50"] <= found[name]["p99"] for name in ("ttft_ms", "tpot_ms", "itl_ms"))
    assert all(use["num_replays"] > 0 and use["hit_rate"] == 1.0 for use in found["graphs"].values())
    assert main(argv) == 0
    printed = capsys.readouterr().out
    for line in ("tiny: 12 requests answered", "time to first token, ms", "decode: 100.0 % of steps ran as graphs"):
        assert line in printed
    server.assert_idle()


def test_a_result_file_has_what_was_sent_and_seen(server: RunningServer, tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    argv = ["--num-requests", "6", "--rate", "0", "--mix", "alpaca", "--shared", "0", "--prompt-spread", "0.1"]
    # The tiny tokenizer has a token a letter, and room for 128 of them.
    assert main(["bench", "serve", "--url", server.url, *argv, "--max-tokens", "9", "--out", str(out)]) in (0, 1)
    result = read_result(out)
    (row,) = result.rows
    assert (result.shape.model, result.where.emulated) == ("tiny", True)
    assert row.params["mix"] == "alpaca"
    assert result.run.command.startswith(
        f"breakgraph bench serve --url {server.url} --num-requests 6 --rate 0.0 --mix "
    )
    assert result.run.command.endswith(" --max-tokens 9 --seed 0")
    answered, failed = row.metrics["answered"].value, row.metrics["failed"].value
    assert answered + failed == 6
    assert row.metrics["generated_tokens"].value == 9 * answered > 0
    assert row.metrics["ttft_p50"].value <= row.metrics["ttft_p99"].value
    assert row.metrics["decode_graph_hit_rate"].value == 100


def test_a_result_file_is_refused_before_the_load_when_its_device_is_elsewhere(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    for url in ("http://192.0.2.1:8000", "http://model.example", "nowhere"):
        assert main(["bench", "serve", "--url", url, "--out", str(out)]) == 2
        assert f"--out records this machine's device, and {url} is not on it" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    stats, sent = server.llm.engine.stats, []
    monkeypatch.setattr(server.llm.engine, "stats", lambda: {**stats(), "device": "cuda"})
    monkeypatch.setattr(drive, "_stream", lambda *args: sent.append(args))
    argv = ["bench", "serve", "--url", server.url, *SMALL, "--max-tokens", "5", "--out", str(out)]
    assert main(argv) == 2
    assert "the server's cuda cannot be seen from here" in capsys.readouterr().err
    assert (out.exists(), sent) == (False, [])


def test_a_file_that_cannot_be_written_is_said_first(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "serve", "--url", server.url, *SMALL, "--max-tokens", "5", "--out", str(tmp_path)]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"no result can be written to {tmp_path}: it is a folder" in printed.err


def test_requests_that_fail_are_counted_and_end_with_1(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", server.url, *SMALL, "--max-tokens", "1000", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["num_answered"], found["num_failed_by_reason"]) == (0, {"status 400": 12})
    assert found["ttft_ms"] is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "no answer from http://127.0.0.1:9: "),
        ("nowhere", "no answer from nowhere: "),
        ("http://127.0.0.1:nine", "url must be like http://127.0.0.1:8000, got 'http://127.0.0.1:nine': "),
    ],
)
def test_no_server_is_one_line(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", url]) == 2
    assert capsys.readouterr().err.startswith(f"breakgraph: {message}")

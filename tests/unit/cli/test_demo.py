"""The demo's own logic, on a stand-in for the LLM; tests/slow runs the real one's parts."""

from __future__ import annotations

from typing import Any

import pytest

from breakgraph.cli import demo
from breakgraph.cli.main import main
from breakgraph.engine.outputs import CompletionOutput, RequestOutput

PHASES = ("prefill", "decode")


class FakeLLM:
    """Answers each question with its number; the eager one may answer otherwise."""

    made: list[dict[str, Any]]
    eager_tokens: list[int]
    emulated: bool

    def __init__(self, model: str, **options: Any) -> None:
        self.options = {"model": model, **options}
        self.made.append(self.options)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def chat(self, conversations: list[Any], params: Any) -> list[RequestOutput]:
        assert params.is_greedy
        is_eager = self.options["prefill_backend"] == "eager"
        tokens = self.eager_tokens if is_eager else [1, 2]
        return [
            RequestOutput(
                request_id=str(i),
                prompt=conversation[0]["content"],
                prompt_token_ids=[i],
                outputs=[CompletionOutput(0, f"answer {i} [bold]", list(tokens), "stop", None)],
                finished=True,
                num_cached_tokens=0,
            )
            for i, conversation in enumerate(conversations)
        ]

    def stats(self) -> dict[str, Any]:
        is_eager = self.options["prefill_backend"] == "eager"
        runner = {
            "captured_buckets": [] if is_eager else [1, 2, 3, 4, 5],
            "num_segments": 0 if is_eager else 31,
            "num_breaks": 0 if is_eager else 30,
            "num_replays_by_bucket": {} if is_eager else {"1": 4, "2": 3},
            "num_eager_steps_by_reason": {"backend_eager": 7} if is_eager else {},
            "capture_sec": 0.5,
        }
        runners = {phase: {"backend": self.options[f"{phase}_backend"], **runner} for phase in PHASES}
        return {"emulated": self.emulated, "runners": runners}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = type("Fake", (FakeLLM,), {"made": [], "eager_tokens": [1, 2], "emulated": True})
    monkeypatch.setattr("breakgraph.engine.llm.LLM", fake)
    monkeypatch.setenv("COLUMNS", "80")
    return fake


def test_answers_then_a_row_for_each_backend_and_phase(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for i, question in enumerate(demo.QUESTIONS):
        assert question in out
        assert f"answer {i} [bold]" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(PHASES)]
    assert rows == [
        ["prefill", "breakable", "31", "30", "1..5", "(5)", "0.5s", "7", "yes", "0"],
        ["decode", "full", "31", "30", "1..5", "(5)", "0.5s", "7", "yes", "0"],
        ["prefill", "eager", "0", "0", "-", "0.5s", "0", "-", "7", "backend_eager"],
        ["decode", "eager", "0", "0", "-", "0.5s", "0", "-", "7", "backend_eager"],
    ]
    assert "captured: capture 1.0 s, answers" in out


def test_the_two_runs_differ_in_their_backends_only(fake: type[FakeLLM]) -> None:
    main(["demo", "--device", "cpu", "--cache-dir", "/cache"])
    captured, eager = fake.made
    assert captured["model"] == "smollm2"
    assert captured["cache_dir"] == "/cache"
    assert eager == {**captured, "prefill_backend": "eager", "decode_backend": "eager"}


@pytest.mark.parametrize("emulated", [True, False])
def test_only_a_cpu_is_said_to_be_emulated(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], emulated: bool
) -> None:
    fake.emulated = emulated
    main(["demo", "--device", "cpu"])
    assert ("no speed is claimed" in " ".join(capsys.readouterr().out.split())) is emulated


def test_other_tokens_than_eager_fail_the_demo(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    fake.eager_tokens = [1, 3]
    assert main(["demo", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert [line.split().count("NO") for line in out.splitlines() if line.startswith(PHASES)] == [1, 1, 0, 0]


def test_the_cache_folder_may_come_from_the_environment(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKGRAPH_CACHE", "/from/env")
    main(["demo", "--device", "cpu"])
    assert {options["cache_dir"] for options in fake.made} == {"/from/env"}

"""Grammars in processes of their own: the same answers, and nobody else is harmed by one that explodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from breakgraph.engine.guide import NO_TOKEN_FITS, Guide
from breakgraph.engine.guided import GrammarCompiler
from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.engine.guided_process import GuideProcesses
from breakgraph.engine.guided_remote import GuideLimits
from breakgraph.errors import BreakgraphError, ClosedError, ConfigError
from unit.engine.byte_tokenizer import ascii_tokenizer

EOS = 95
# Which limit a form passes first does not depend on how fast the machine is.
HASTY = GuideLimits(compile_sec=1.0, token_sec=60.0, memory_bytes=4 << 30)
PATIENT = GuideLimits(compile_sec=60.0, token_sec=0.5, memory_bytes=192 << 20)
GOOD = GuidedDecodingParams(regex="(cat|dog)-[0-9]{2}")
SLOW_AT_FIRST = GuidedDecodingParams(
    json={"type": "object", "properties": {f"p{i}": {} for i in range(300)}, "minProperties": 100}
)
LARGE = GuidedDecodingParams(regex="a?" * 20_000)
SLOW_LATER = GuidedDecodingParams(regex="((a{0,1000}){0,1000}){0,1000}")


@pytest.fixture(scope="module")
def processes() -> Iterator[GuideProcesses]:
    processes = GuideProcesses(ascii_tokenizer(), 96, [EOS], PATIENT)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def hasty_processes() -> Iterator[GuideProcesses]:
    processes = GuideProcesses(ascii_tokenizer(), 96, [EOS], HASTY)
    yield processes
    processes.close()


def mask(guide: Guide) -> list[int]:
    while (bits := guide.allowed()) is None:
        guide.wait(60)
    return [int(word) for word in bits]


def token(text: str) -> int:
    return int(ascii_tokenizer()(text).input_ids[0])


def worker_of(processes: GuideProcesses) -> psutil.Process:
    assert processes._worker is not None
    return psutil.Process(processes._worker.pid)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (GOOD, "dog-07"),
        (GuidedDecodingParams(json={"type": "object", "properties": {"a": {"enum": ["x", 1]}}}), '{"a": 1}'),
        (GuidedDecodingParams(json_object=True), "{}"),
    ],
    ids=["regex", "schema", "object"],
)
def test_masks_are_those_of_this_process(processes: GuideProcesses, params: GuidedDecodingParams, text: str) -> None:
    near, far = (g.compile(params).guide() for g in (GrammarCompiler(ascii_tokenizer(), 96, [EOS]), processes))
    for character in text:
        assert mask(far) == mask(near)
        near.accept(token(character))
        far.accept(token(character))
    assert mask(far) == mask(near)
    assert (far.failure, near.failure) == (None, None)


def test_answers_of_a_grammar_go_on_beside_each_other(processes: GuideProcesses) -> None:
    grammar = processes.compile(GOOD)
    first, second = grammar.guide(), grammar.guide()
    first.accept(token("c"))
    assert mask(second) == mask(grammar.guide()) != mask(first)
    second.accept(token("d"))
    assert mask(first) != mask(second)
    pid = len(worker_of(processes).children())
    assert processes.compile(GOOD) is grammar
    assert len(worker_of(processes).children()) == pid


def test_more_answers_than_a_socket_holds_questions_and_replies_for(processes: GuideProcesses) -> None:
    """Nobody waits for room in it."""
    grammar = processes.compile(GOOD)
    guides = [grammar.guide() for _ in range(5_000)]
    assert {tuple(mask(guide)) for guide in reversed(guides)} == {tuple(mask(grammar.guide()))}


def test_a_place_that_no_token_fits_is_said(processes: GuideProcesses) -> None:
    guide = processes.compile(GuidedDecodingParams(regex="aé")).guide()
    guide.accept(token("a"))
    assert mask(guide) == [0, 0, -(1 << 31)]
    assert guide.failure == NO_TOKEN_FITS


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (LARGE, "the regex takes more than 192 MiB of memory, or more than xgrammar can to compile; make it smaller"),
        (GuidedDecodingParams(regex="("), "the regex cannot be used: Regex parsing error"),
        (GuidedDecodingParams(regex="é"), "no token of the vocabulary can begin"),
    ],
    ids=["memory", "error", "beginning"],
)
def test_what_cannot_be_compiled_is_refused_once_and_remembered(
    processes: GuideProcesses, params: GuidedDecodingParams, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused_once(processes, params, message, monkeypatch)


def test_what_takes_too_long_to_compile_too(
    hasty_processes: GuideProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "the JSON schema takes more than 1 s of computing to compile; make it smaller"
    check_refused_once(hasty_processes, SLOW_AT_FIRST, message, monkeypatch)


def check_refused_once(
    processes: GuideProcesses, params: GuidedDecodingParams, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.compile(params)
    monkeypatch.setattr(processes, "_open_link", None)
    with pytest.raises(ConfigError, match=message):
        processes.compile(params)


def test_an_answer_that_gets_too_slow_fails_and_others_go_on(processes: GuideProcesses) -> None:
    other = processes.compile(GOOD).guide()
    grammar = processes.compile(SLOW_LATER)
    guide = grammar.guide()
    processes.compile(GuidedDecodingParams(regex="a process that is younger"))
    while guide.failure is None:
        mask(guide)
        guide.accept(token("a"))
    assert guide.failure.startswith("the form that is asked for takes more than 0.5 s of computing for one token")
    assert guide.allowed() is not None  # something can be drawn
    assert mask(other)[0] == mask(processes.compile(GOOD).guide())[0]
    # The process is gone, so the next one who asks gets another.
    assert processes.compile(SLOW_LATER) is not grammar


def test_nothing_of_this_process_is_within_reach(processes: GuideProcesses) -> None:
    """Neither sockets and files nor signals of the terminal."""
    processes.compile(GOOD)
    worker = worker_of(processes)
    for process in (worker, *worker.children()):
        assert process.net_connections("inet") == []
        open_files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        kinds = [name.split(":")[0] for name in open_files]
        assert set(kinds) <= {"/dev/null", "socket", "pipe"}
        assert process == worker or (kinds.count("socket"), kinds.count("pipe")) == (1, 0)
        assert process.environ()["CUDA_VISIBLE_DEVICES"] == ""
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert mask(processes.compile(GOOD).guide())
    assert worker_of(processes) == worker


def test_a_killed_worker_is_an_error_and_then_replaced() -> None:
    processes = GuideProcesses(ascii_tokenizer(), 96, [EOS], PATIENT)
    try:
        guide = processes.compile(GOOD).guide()
        mask(guide)
        first = worker_of(processes)
        family = [first, *first.children()]
        for process in family:
            process.kill()
        processes._worker.wait()  # type: ignore[union-attr]
        guide.accept(token("c"))
        mask(guide)
        assert guide.failure is not None
        assert mask(processes.compile(GOOD).guide())
        assert worker_of(processes) != first
    finally:
        processes.close()


def test_closing_ends_all_processes_and_what_they_do() -> None:
    processes = GuideProcesses(ascii_tokenizer(), 96, [EOS])
    guide = processes.compile(GOOD).guide()
    mask(guide)
    worker = worker_of(processes)
    family = [worker, *worker.children()]
    guide.accept(token("c"))
    processes.close()
    processes.close()
    psutil.wait_procs(family)
    assert guide.allowed() is not None
    with pytest.raises(ClosedError):
        processes.compile(SLOW_AT_FIRST)


def test_grammars_that_nobody_has_are_dropped_last_used_first(
    processes: GuideProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakgraph.engine.guided_process._NUM_KEPT", 2)
    forms = [GuidedDecodingParams(regex=f"x{number}") for number in range(3)]
    held = processes.compile(forms[0])
    mask(held.guide())
    for form in (*forms, *forms[1:]):
        processes.compile(form)
    assert list(processes._kept) == forms[1:]
    assert processes.compile(forms[0]) is held


def test_what_cannot_be_a_limit() -> None:
    for name in ("compile_sec", "token_sec", "memory_bytes"):
        options: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=f"{name} must be > 0, got 0"):
            GuideLimits(**options)


def test_a_worker_that_does_not_start_is_no_fault_of_the_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr("breakgraph.engine.guided_worker.__file__", str(program))
    processes = GuideProcesses(ascii_tokenizer(), 96, [EOS])
    with pytest.raises(BreakgraphError, match="does not start: exit status 3") as failure:
        processes.compile(GOOD)
    assert not isinstance(failure.value, ConfigError)
    processes.close()

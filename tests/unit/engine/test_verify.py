"""`LLM(verify=...)` and `LLM.verify()`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph import LLM, SamplingParams
from breakgraph.engine.engine import Engine
from breakgraph.errors import ConfigError, VerificationError
from breakgraph.graph.plan import Plan
from breakgraph.runners import Runner
from breakgraph.verify import LiveCheck, VerifySummary
from unit.engine.small import SMALL

FEW: dict[str, Any] = {"prefill_buckets": (16,), "decode_buckets": (8,)}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42], list(range(60, 90))]
PARAMS = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
          SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True),
          SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)]  # fmt: skip


def make(folder: Path, device: torch.device, **options: Any) -> LLM:
    return LLM(str(folder), device=str(device), **{**SMALL, **options})


def answers(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def kv_tensors(llm: LLM) -> list[torch.Tensor]:
    kv = llm.engine.kv
    assert kv is not None
    return [t for buffers in (kv.key, kv.value) for t in buffers.values()]


def kv_bytes(llm: LLM) -> list[torch.Tensor]:
    """All blocks but the reserved one."""
    return [t[1:].clone() for t in kv_tensors(llm)]


def test_at_startup(llama_folder: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="breakgraph"), make(llama_folder, device, verify="startup", **FEW) as llm:
        cost = llm.stats()["verify"]["startup"]
        assert (cost["ok"], cost["num_plans"], cost["num_steps"]) == (True, 2, 6)
        assert cost["verify_sec"] > 0
        assert cost["snapshot_bytes"] > 0
        assert llm.stats()["verify"]["live"] is None
        assert llm.stats()["num_free_kv_blocks"] == llm.stats()["num_kv_blocks"] - 1
        assert all(not r["num_replays_by_bucket"] for r in llm.stats()["runners"].values())
        verified = answers(llm)
    lines = [r.getMessage() for r in caplog.records if "verified 2 plans in 6 steps, all equal to eager" in r.message]
    assert len(lines) == 1
    with make(llama_folder, device, **FEW) as llm:
        assert llm.stats()["verify"] == {"startup": None, "live": None}
        assert answers(llm) == verified


@pytest.fixture
def wrong_replays(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every replay put one wrong number into its logits."""

    def plant() -> None:
        replay = Plan.replay

        def wrong(self: Plan) -> Any:
            logits = replay(self)
            logits[0, 0] += 1
            return logits

        monkeypatch.setattr(Plan, "replay", wrong)

    return plant


def test_at_startup_a_difference_is_an_error_and_everything_is_closed(
    llama_folder: Path, device: torch.device, wrong_replays: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_replays()
    closed = []
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(VerificationError, match="replays differ from eager") as caught:
        make(llama_folder, device, verify="startup", **FEW)
    assert len(closed) == 1
    assert closed[0].kv is None
    summary = caught.value.report
    assert isinstance(summary, VerifySummary)
    assert [report.subject for report in summary.wrong] == ["prefill[16]", "decode[8]"]
    assert "1 of" in str(caught.value)


def test_a_sample_of_the_steps_changes_nothing(llama_folder: Path, device: torch.device) -> None:
    with make(llama_folder, device) as llm:
        want, cached = answers(llm), kv_bytes(llm)
    with make(llama_folder, device, verify="sample:1") as llm:
        assert answers(llm) == want
        for one, other in zip(kv_bytes(llm), cached, strict=True):
            assert torch.equal(one, other)
        counts = llm.stats()["verify"]["live"]
        replays = sum(sum(r["num_replays_by_bucket"].values()) for r in llm.stats()["runners"].values())
        assert replays > 5
        assert counts["num_equal"] + counts["num_within_spread"] == replays
        assert counts["num_different"] == 0
        assert counts["num_skipped_by_reason"] == {}


def test_a_share_is_drawn_the_same_way_every_time(llama_folder: Path, device: torch.device) -> None:
    counts = []
    for _ in range(2):
        with make(llama_folder, device, verify="sample:0.5", **FEW) as llm:
            answers(llm)
            counts.append(llm.stats()["verify"]["live"]["num_equal"])
            replays = sum(sum(r["num_replays_by_bucket"].values()) for r in llm.stats()["runners"].values())
    assert counts[0] == counts[1]
    assert 0 < counts[0] < replays


def test_a_difference_is_counted_logged_and_served(
    llama_folder: Path, device: torch.device, wrong_replays: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    wrong_replays()
    with make(llama_folder, device, **FEW) as llm:
        want, cached = answers(llm), kv_bytes(llm)
    with make(llama_folder, device, verify="sample:1", **FEW) as llm:
        assert answers(llm) == want
        assert all(torch.equal(one, other) for one, other in zip(kv_bytes(llm), cached, strict=True))
        counts = llm.stats()["verify"]["live"]
    assert counts["num_equal"] == 0
    assert counts["num_different"] > 3
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 3
    assert "result['logits']: 1 of" in told[0]


def test_steps_that_cannot_be_compared_are_skipped_and_counted(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"prefill_buckets": (4,), "decode_buckets": (8,)}
    warm_up = Runner.warm_up

    def with_state(self: Runner) -> None:
        warm_up(self)
        if self.spec.phase == "decode":
            next(counters).add_(1)

    with make(llama_folder, device, **options) as llm:
        want = answers(llm)
    seen: list[LiveCheck] = []
    init = LiveCheck.__init__

    def keep(self: LiveCheck, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(LiveCheck, "__init__", keep)
    monkeypatch.setattr(Runner, "warm_up", with_state)
    counter = torch.zeros(1)
    counters = iter([counter] * 10)
    monkeypatch.setattr(LiveCheck, "_versions", lambda self: [counter._version])
    with make(llama_folder, device, verify="sample:1", **options) as llm:
        assert answers(llm) == want
        counts = llm.stats()["verify"]["live"]
    skipped = counts["num_skipped_by_reason"]
    assert skipped.pop("model_state") > 0
    assert sum(skipped.values()) > 0
    assert all(reason.startswith("eager_") for reason in skipped)


def test_an_eager_run_leaves_no_kv_and_no_random_numbers_behind(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, run_eagerly = Runner.run, Runner.run_padded_eager

    def drawing(self: Runner, batch: Any) -> Any:
        torch.rand(1)
        return run(self, batch)

    def untidy(self: Runner, batch: Any) -> Any:
        logits = run_eagerly(self, batch)
        torch.rand(3)
        for tensor in kv_tensors(llm):
            tensor.flatten(0, 1)[[int(slot) for slot in batch.slot_mapping]] = 7
        return logits

    monkeypatch.setattr(Runner, "run", drawing)
    monkeypatch.setattr(Runner, "run_padded_eager", untidy)
    found = []
    for verify in (None, "sample:0.5"):
        with make(llama_folder, device, verify=verify, **FEW) as llm:
            torch.manual_seed(11)
            found.append((answers(llm), kv_bytes(llm), torch.get_rng_state()))
            counts = llm.stats()["verify"]["live"]
    assert counts["num_different"] > 0
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    assert torch.equal(found[0][2], found[1][2])


def test_a_check_that_raises_costs_no_answer(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(self: Runner, batch: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for this")

    options = {**FEW, "verify": "sample:0.5"}
    with make(llama_folder, device, **options) as llm:
        want, cached = answers(llm), kv_bytes(llm)
    monkeypatch.setattr(Runner, "run_padded_eager", no_memory)
    with make(llama_folder, device, **options) as llm:
        assert answers(llm) == want
        assert all(torch.equal(one, other) for one, other in zip(kv_bytes(llm), cached, strict=True))
        counts = llm.stats()["verify"]["live"]
    assert counts["num_skipped_by_reason"]["check_raised"] > 0
    assert counts["num_equal"] == 0
    assert any("could not be compared with eager" in r.getMessage() for r in caplog.records)


def test_on_demand_and_only_while_idle(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = answers(llm)[:2]  # the third draws from the engine's own numbers
    assert llm.verify().ok
    assert answers(llm)[:2] == before
    llm.reset_prefix_cache()
    request = llm.engine.make_request([1, 2, 3], SamplingParams(max_tokens=2))
    llm.engine.add(request)
    with pytest.raises(ConfigError, match="there are requests"):
        llm.verify()
    llm.engine.abort([request.request_id])


@pytest.mark.parametrize(
    "value", ["", "always", "sample", "sample:", "sample:0", "sample:2", "sample:nan", "0.1", True]
)
def test_what_verify_does_not_mean(value: Any) -> None:
    with pytest.raises(ConfigError, match="verify must be startup or sample: and a share"):
        LLM("model", verify=value)

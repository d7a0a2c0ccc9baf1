"""Verification of runners: what is right passes, each planted fault gets the right verdict and place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from breakgraph.attention import attend, current_step
from breakgraph.graph import eager_on_graph
from breakgraph.runners.buffers import StaticBuffers
from breakgraph.verify import Verdict, VerifySummary, verify_runners
from breakgraph.verify.compare import same_bits
from unit.runners.toy_model import HIDDEN, NUM_HEADS, ToyModel
from unit.verify.toy_setup import LIMITS, PHASES, toy_runner, verified


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_right_is_equal(phase: str, device: torch.device) -> None:
    summary = verified(phase, device)
    assert summary.ok, "\n".join(map(str, summary.reports))
    assert summary.num_steps == 6
    assert len(summary.reports) == 2
    assert "all equal to eager" in summary.line()
    assert summary.snapshot_bytes > 0
    assert (summary.peak_bytes is None) == (device.type == "cpu")
    roundings = [s.rounding for r in summary.reports for s in r.steps if s.rounding is not None]
    assert roundings, "no step was padded"
    assert max(roundings) < 1e-4


class Faulty(ToyModel):
    """The toy decoder with the attention of one layer replaced."""

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        hidden = self.tokens[fields["input_ids"]] + self.positions[fields["positions"]]
        for layer, (w_qkv, w_out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (hidden @ w_qkv).unflatten(1, (3, NUM_HEADS, HIDDEN // NUM_HEADS)).unbind(1)
            attended = torch.zeros_like(q)
            self.attend(q, k, v, attended, layer)
            hidden = self.after(torch.tanh(hidden + attended.flatten(1) @ w_out), layer)
        return hidden[fields["logits_rows"]] @ self.tokens.T

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        attend(q, k, v, out, layer)

    def after(self, hidden: Tensor, layer: int) -> Tensor:
        return hidden


def first_wrong(summary: VerifySummary) -> Any:
    assert not summary.ok
    for report in summary.wrong:
        assert max(map(len, str(report).splitlines())) <= 80
    return summary.wrong[0]


def test_f13_an_attention_that_was_not_marked(device: torch.device) -> None:
    """Its lengths are the dummy batch's at every replay: two partitions of one bucket cannot both be right."""

    class Unmarked(Faulty):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
            if layer == 1:
                start = 0
                for q_len in current_step().step.q_lens:  # Python that a graph does not hold
                    rows = slice(start, start + q_len)
                    out[rows] = v[rows].cumsum(0)
                    start += q_len
            else:
                attend(q, k, v, out, layer)

    report = first_wrong(verified("prefill", device, Unmarked(device).forward))
    assert report.steps[-1].verdict is Verdict.DIFFERENT
    assert report.culprit.segment == 1
    assert report.culprit.break_name is None
    assert "cumsum" in report.culprit.op
    assert "test_runners.py" in report.culprit.source
    assert "fixed when the plan was captured" in report.culprit.hint


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_f14_a_longest_length_that_became_a_constant(phase: str, device: torch.device) -> None:
    class Baked(Faulty):
        def after(self, hidden: Tensor, layer: int) -> Tensor:
            return hidden / max(current_step().step.seq_lens) if layer == 0 else hidden

    report = first_wrong(verified(phase, device, Baked(device).forward))
    assert report.culprit.op == "aten.div.Tensor"
    assert "in after" in report.culprit.source


def test_f10_rows_past_the_live_ones_that_reach_them(device: torch.device) -> None:
    """F10: the break fills the live rows only, and something mixes rows afterwards."""

    @eager_on_graph(mutates=("out",))
    def live_rows_only(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        live = current_step().step.num_tokens
        attend(q, k, v, full := torch.empty_like(out), layer)
        out[:live] = full[:live]

    class Mixing(Faulty):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
            live_rows_only(q, k, v, out, layer)

        def after(self, hidden: Tensor, layer: int) -> Tensor:
            return hidden - hidden.amax(0) * 1e-3

    report = first_wrong(verified("prefill", device, Mixing(device).forward))
    assert report.steps[-1].verdict is Verdict.PADDING
    assert report.steps[-1].differences[0].num_non_finite > 0
    assert "rows past the live ones reach live results" in str(report)
    assert "live_rows_only" in report.culprit.break_name
    assert "declare valid_rows=" in report.culprit.hint


def test_keys_that_go_to_the_slots_of_another_step(device: torch.device) -> None:
    seen: list[Tensor] = []

    @eager_on_graph
    def store(k: Tensor, layer: int) -> Tensor:
        metadata = current_step()
        if len(seen) < 2:  # warm-up and capture
            seen.append(metadata.step.slot_mapping_gpu.clone())
        is_replay = len(seen) == 2 and not running["eagerly"]
        slots = seen[-1] if is_replay else metadata.step.slot_mapping_gpu
        kv.write(layer, slots[: k.shape[0]], k.repeat_interleave(1, dim=1), k)
        return k + 0

    running = {"eagerly": False}

    class Misplaced(Faulty):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
            running["eagerly"] = True  # not at a replay, which runs the breaks alone
            out.copy_(store(k, layer))
            running["eagerly"] = False

    model = Misplaced(device)
    holder: dict[str, Any] = {}

    def forward(fields: Mapping[str, Tensor]) -> Tensor:
        return model.forward(fields) if holder else fields["positions"][fields["logits_rows"]].float()[:, None]

    with toy_runner("prefill", device, forward) as (runner, kv):
        for size in runner.spec.ladder:
            runner.backend.release(runner.spec.key(size))
        holder["ready"] = True
        runner.capture()
        report = first_wrong(verify_runners([runner], kv, LIMITS))
    assert report.steps[-1].verdict is Verdict.DIFFERENT
    assert any("written KV" in difference.path for difference in report.steps[-1].differences)


def test_metadata_that_a_load_forgets(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """F12: without poison, eager and replay would read the same stale rows and agree."""
    load = StaticBuffers.load

    def forgetful(self: StaticBuffers, batch: Any, size: int, for_breaks: bool) -> Mapping[str, Tensor]:
        kept = self.views(size)["positions"].clamp(0, 1)  # another bucket's fields may lie there
        fields = load(self, batch, size, for_breaks)
        fields["positions"].copy_(kept)
        return fields

    with toy_runner("prefill", device) as (runner, kv):
        monkeypatch.setattr(StaticBuffers, "load", forgetful)
        report = first_wrong(verify_runners([runner], kv, LIMITS))
    assert report.steps[-1].verdict is Verdict.DIFFERENT


def test_blocks_of_others_that_a_replay_writes(device: torch.device) -> None:
    """F11: bytes outside the step's slots and the reserved block are compared too."""
    running = {"eagerly": False}

    @eager_on_graph
    def spill(hidden: Tensor) -> Tensor:
        if not running["eagerly"]:
            kv.key[0][LIMITS.blocks[-1]] += 1
        return hidden + 0

    class Spilling(Faulty):
        def after(self, hidden: Tensor, layer: int) -> Tensor:
            running["eagerly"] = True
            hidden = spill(hidden)
            running["eagerly"] = False
            return hidden

    with toy_runner("prefill", device, Spilling(device).forward) as (runner, kv):
        report = first_wrong(verify_runners([runner], kv, LIMITS))
    paths = [difference.path for difference in report.steps[-1].differences]
    assert paths == ["result['KV of the blocks']"]


def test_a_phase_that_captures_nothing_has_nothing_to_verify(device: torch.device) -> None:

    with toy_runner("decode", device) as (runner, kv):
        for size in runner.spec.ladder:
            runner.backend.release(runner.spec.key(size))
        summary = verify_runners([runner], kv, LIMITS)
    assert summary.ok
    assert summary.reports == ()


def test_the_live_buffers_and_the_stats_are_not_touched(device: torch.device) -> None:

    with toy_runner("decode", device) as (runner, kv):
        reserved = kv.key[0][0].clone()
        verify_runners([runner], kv, LIMITS)
        assert runner.stats.to_dict()["num_replays_by_bucket"] == {}
        assert same_bits(kv.key[0][0][1:], reserved[1:])


def test_what_padding_leaves_behind_does_not_stay_in_the_reserved_block(device: torch.device) -> None:
    """Masked reads multiply it by zero, and zero times NaN is NaN."""

    @eager_on_graph(mutates=("out",))
    def live_rows_only(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        live = current_step().step.num_tokens
        attend(q, k, v, full := torch.empty_like(out), layer)
        out[:live] = full[:live]

    class Undefined(Faulty):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
            live_rows_only(q, k, v, out, layer)

    with toy_runner("decode-breakable", device, Undefined(device).forward) as (runner, kv):
        assert verify_runners([runner], kv, LIMITS).ok, "this attention clears what it masks"
        assert all(bool(t.isfinite().all()) for buffers in (kv.key, kv.value) for t in buffers.values())


def test_a_bucket_that_the_blocks_cannot_fill_is_said(device: torch.device) -> None:
    few = dataclasses.replace(LIMITS, blocks=range(1, 4))
    with toy_runner("prefill", device) as (runner, kv):
        summary = verify_runners([runner], kv, few)
    assert summary.cost()["num_untried_plans"] == 1
    assert "not tried" in str(summary.reports[1])
    assert "but prefill[16], for which there were too few KV blocks" in summary.line()

"""Faults of values that a capture keeps, lengths, numbers and weights, and of graphs that no step reaches."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.attention import attend, current_step, make_attention
from breakgraph.backends import make_backend
from breakgraph.errors import HazardError, StalePlanError, UntraceableError
from breakgraph.graph import PlanFamily, eager_on_graph
from breakgraph.runners import PrefillRunner
from breakgraph.runners.admission import EagerReason
from breakgraph.verify import Verdict
from unit.runners.fakes import NUM_BLOCKS, make_prefill_spec
from unit.runners.test_runner_graph import new_requests
from unit.runners.toy_model import HEAD_DIM, LAYERS, NUM_HEADS, ToyModel, new_cache, next_step
from unit.verify.toy_setup import verified


class OneLayer(ToyModel):
    """One layer of the toy decoder, whose attention and output can be replaced."""

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        hidden = self.tokens[fields["input_ids"]]
        q, k, v = (hidden @ self.qkv[0]).unflatten(1, (3, NUM_HEADS, HEAD_DIM)).unbind(1)
        hidden = self.scaled(hidden + self.attended(q, k, v).flatten(1))
        return hidden[fields["logits_rows"]] @ self.tokens.T

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        attend(q, k, v, out, 0)
        return out

    def scaled(self, hidden: Tensor) -> Tensor:
        return hidden


class Unmarked(OneLayer):
    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        super().attended(q, k, v)
        out, start = torch.zeros_like(q), 0
        for q_len in current_step().step.q_lens:  # Python, of which a graph holds one run
            out[start : start + q_len] = v[start : start + q_len].cumsum(0)
            start += q_len
        return out


class Baked(OneLayer):
    def scaled(self, hidden: Tensor) -> Tensor:
        return hidden / max(current_step().step.seq_lens)


KEPT = pytest.mark.parametrize("model", [Unmarked, Baked], ids=["f13-lengths", "f14-longest-length"])


@KEPT
def test_f13_f14_lengths_that_stay_as_captured_are_no_silent_answer(
    device: torch.device, model: type[OneLayer]
) -> None:
    assert verified("prefill", device, OneLayer(device).forward).ok
    summary = verified("prefill", device, model(device).forward)
    assert not summary.ok
    assert {report.steps[-1].verdict for report in summary.wrong} == {Verdict.DIFFERENT}


@KEPT
def test_f13_f14_a_trace_refuses_to_read_lengths_outside_of_a_break(
    device: torch.device, model: type[OneLayer]
) -> None:
    with pytest.raises(UntraceableError, match="use backend 'breakable', which needs no tracing"):
        verified("prefill", device, model(device).forward)


@eager_on_graph
def doubled(x: Tensor) -> Tensor:
    return x * 2


class SlidingLayer:
    """As the layers of a cache that slides: the tensor stays, and how much of it is filled is a number."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(4, 4, device=device)
        self.filled = 0

    def push(self, x: Tensor) -> Tensor:
        self.rows[self.filled % 4].copy_(x[0])
        self.filled += 1
        return self.rows.sum(0) / self.filled


def test_f14_a_cache_that_counts_in_python_is_refused_with_its_path(device: torch.device) -> None:
    layers, x = [SlidingLayer(device) for _ in range(2)], torch.randn(1, 4, device=device)
    cache = SimpleNamespace(layers=layers)

    def forward(x: Tensor) -> Tensor:
        return doubled(cache.layers[0].push(x)) + 1

    with torch.no_grad(), pytest.raises(HazardError, match=r"cache\.layers\[0\]\.filled cannot .*\(1 -> 2\)"):
        breakgraph.capture(forward, x)
    push = eager_on_graph(layers[0].push)

    def in_a_break(x: Tensor) -> Tensor:
        return doubled(push(x)) + 1

    with torch.no_grad(), breakgraph.capture(in_a_break, x, state=[layers[0].rows]) as graph:
        x.add_(1)
        filled, rows = layers[0].filled, layers[0].rows.clone()
        replayed = graph.replay().clone()
        layers[0].filled = filled
        layers[0].rows.copy_(rows)
        assert torch.equal(replayed, forward(x))


def adapted(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(4, 4), "adapter": nn.Linear(4, 4)}).to(device)
    return model, torch.randn(3, 4, device=device)


def test_f32_an_adapter_that_is_swapped_is_seen_or_refused(device: torch.device) -> None:
    model, x = adapted(device)

    def forward(x: Tensor) -> Tensor:
        return doubled(model["base"](x)) + model["adapter"](x)

    with torch.no_grad(), breakgraph.capture(forward, x) as graph:
        model["adapter"].weight.copy_(torch.randn(4, 4))
        assert torch.equal(graph.replay(), forward(x))
        kept = model["adapter"].weight
        model["adapter"].weight = nn.Parameter(torch.zeros(4, 4, device=device))
        with pytest.raises(StalePlanError, match=r"adapter\.weight was float32.* in other memory"):
            graph.replay()
        model["adapter"].weight = kept
        assert torch.equal(graph.replay(), forward(x))


def test_f32_a_version_stands_for_what_no_address_shows(device: torch.device) -> None:
    model, x = adapted(device)
    adapters = SimpleNamespace(version=1)
    with torch.no_grad(), breakgraph.capture(model["base"], x, version=lambda: adapters.version) as graph:
        graph.replay()
        adapters.version = 2
        with pytest.raises(StalePlanError, match=r"version= gave 1 at the capture and gives 2 now"):
            graph.replay()


def test_f34_a_step_that_no_graph_fits_is_counted_with_its_reason(device: torch.device) -> None:
    model, kv = ToyModel(device), new_cache(device, NUM_BLOCKS)
    attention = make_attention("sdpa", device, torch.float32, LAYERS)
    attention.bind(kv)
    spec = make_prefill_spec(buckets=(4,))
    with PlanFamily(device) as family:
        runner = PrefillRunner(spec, make_backend("breakable", family), model.forward, attention, device)
        runner.allocate()
        (request,) = new_requests(1)
        for count, reasons in (
            (3, {EagerReason.NOT_CAPTURED: 1}),
            (9, {EagerReason.NOT_CAPTURED: 1, EagerReason.TOO_MANY_TOKENS: 1}),
        ):
            logits = runner.run(next_step([(request, count)]))
            expected = model.without_cache(request.token_ids[: request.num_cached])
            torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
            assert runner.stats.eager_steps == reasons
        runner.capture()
        runner.run(next_step([(request, 2)]))
        assert runner.stats.eager_steps == reasons
        assert runner.stats.replays == {4: 1}
        runner.close()

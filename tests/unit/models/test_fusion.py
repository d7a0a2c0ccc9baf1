"""Compiled blocks: the same numbers as before, traced once for all layers, captured as anything else is.

On a CPU the blocks are traced and run operator by operator; what Inductor makes of them shows on a GPU only.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from breakgraph.attention import make_attention, use_step
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily
from breakgraph.models import HFModel, fuse
from packed_driver import PackedDriver, TokenSequence
from tiny_models import TINY_CONFIGS, VOCAB_SIZE, tiny_model


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


def driver_of(name: str, fused: bool) -> PackedDriver:
    model = HFModel(tiny_model(name, "breakgraph"), name)
    if fused:
        fuse(model)
    return PackedDriver(model, make_attention("auto", "cpu", torch.float32, model.layers))


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_architecture_gives_the_same_numbers(name: str) -> None:
    plain, fused = (driver_of(name, fused) for fused in (False, True))
    for driver in (plain, fused):
        driver.work = [TokenSequence(tokens(count)) for count in (12, 7)]
    for counts, padding, phase in (((9, 5), 3, "prefill"), ((2, 1), 4, "prefill"), ((1, 1), 2, "decode")):
        steps = [
            driver.step(list(zip(driver.work, counts, strict=True)), padding=padding, phase=phase)
            for driver in (plain, fused)
        ]
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*steps, strict=True))
    reasons = [reason for reason in counters["graph_break"] if "torch.compiler.disable" not in reason]
    assert reasons == []
    assert counters["stats"]["unique_graphs"] > 0


def test_layers_share_what_was_traced() -> None:
    driver = driver_of("qwen3", fused=True)
    sequence = TokenSequence(tokens(40))
    driver.step([(sequence, 9)])
    traced = counters["stats"]["unique_graphs"]
    assert 0 < traced <= 6  # in front of attention and behind it, not once a layer
    for count in (2, 17, 5):
        driver.step([(sequence, count)], padding=3)
    assert counters["stats"]["unique_graphs"] == traced


@pytest.mark.parametrize("breaks", [True, False])
def test_a_captured_plan_replays_what_the_plain_model_computes(breaks: bool) -> None:
    plain, fused = (driver_of("qwen3", fused) for fused in (False, True))
    sequences = [TokenSequence(tokens(20)) for _ in range(2)]
    step, ids, positions = fused.prepare([(sequences[0], 8)], 4, "prefill")
    _, _, _ = plain.prepare([(sequences[1], 8)], 4, "prefill")
    inputs = [torch.tensor(values) for values in (ids, positions)]
    rows = torch.arange(12)

    with torch.no_grad(), PlanFamily("cpu") as family:
        with use_step(fused.attention.plan(step)):
            plan = family.capture(lambda: fused.model.forward(*inputs, rows), breaks=breaks)
        traced = counters["stats"]["unique_graphs"]
        inputs[0].copy_(torch.randint(0, VOCAB_SIZE, (12,)))
        with use_step(plain.attention.plan(step)):
            wanted = plain.model.forward(*inputs, rows)
        family.poison()
        with use_step(fused.attention.plan(step)):
            assert torch.allclose(plan.replay(), wanted, atol=1e-5)
            assert torch.equal(plan.outputs, fused.model.forward(*inputs, rows))
        assert counters["stats"]["unique_graphs"] == traced
        report = plan.explain()
        assert report.num_breaks == (2 if breaks else 0)
        # The weights of the blocks are kept, and no pool memory is.
        assert report.pinned_bytes >= sum(p.numel() * 4 for p in fused.model.module.model.layers.parameters())


def test_a_replaced_weight_is_noticed() -> None:
    from breakgraph.errors import StalePlanError

    driver = driver_of("llama", fused=True)
    step, ids, positions = driver.prepare([(TokenSequence(tokens(20)), 8)], 0, "prefill")
    inputs = [torch.tensor(values) for values in (ids, positions)]
    with torch.no_grad(), PlanFamily("cpu") as family, use_step(driver.attention.plan(step)):
        plan = family.capture(lambda: driver.model.forward(*inputs, torch.arange(8)))
        layer = driver.model.module.model.layers[1]
        layer.mlp.up_proj.weight = nn.Parameter(torch.zeros_like(layer.mlp.up_proj.weight), requires_grad=False)
        with pytest.raises(StalePlanError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            plan.replay()


def test_blocks_stay_compiled_when_a_scan_has_seen_them() -> None:
    """Dynamo skips code for good that it once met under a mode."""
    driver = driver_of("llama", fused=True)
    step, ids, positions = driver.prepare([(TokenSequence(tokens(20)), 8)], 0, "prefill")
    inputs = [torch.tensor(values) for values in (ids, positions)]
    with torch.no_grad(), PlanFamily("cpu") as family, use_step(driver.attention.plan(step)):
        plan = family.capture(lambda: driver.model.forward(*inputs, torch.arange(8)), on_hazard="raise")
        assert torch.equal(plan.replay(), driver.model.forward(*inputs, torch.arange(8)))
    traced = counters["stats"]["unique_graphs"]
    driver.step([(TokenSequence(tokens(1)), 1)])  # traced anew, where anything is: for a single row
    assert counters["stats"]["unique_graphs"] > traced > 0


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model = HFModel(tiny_model("llama", "breakgraph"), "llama")
    model.module.model.layers = nn.Sequential(*model.module.model.layers)
    with pytest.raises(ConfigError, match=r"fusion='inductor' compiles a list of 2 layers, and llama .* has none"):
        fuse(model)

"""Padding rows reach no expert; live rows come out as they do without padding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from breakgraph.attention import make_attention, use_step
from breakgraph.models import HFModel
from breakgraph.models.experts import LIVE_GROUPED_MM, TRITON, triton_refusals
from breakgraph.models.routing import watch_routing
from packed_driver import CountingDriver, PackedDriver, TokenSequence
from tiny_models import randomize, tiny_config
from triton_device import DEVICE

MOE_NAMES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe")


def moe_model(
    name: str, device: torch.device, experts: str = LIVE_GROUPED_MM, dtype: torch.dtype = torch.bfloat16
) -> HFModel:
    module = AutoModelForCausalLM.from_config(
        tiny_config(name), attn_implementation="breakgraph", experts_implementation=experts, dtype=dtype
    )
    randomize(module)
    return HFModel(module.to(device), name)


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of each call, the experts of each row."""
    seen: list[torch.Tensor] = []
    inner = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def spy(module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen.append(index.clone())
        return inner(module, hidden, index, weights)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", spy)
    return seen


@pytest.mark.parametrize("name", MOE_NAMES)
def test_padding_rows_go_to_no_expert(name: str, device: torch.device, routed: list[torch.Tensor]) -> None:
    model = moe_model(name, device)
    num_experts = next(m.num_experts for m in model.module.modules() if hasattr(m, "gate_up_proj"))
    driver = CountingDriver(model, make_attention("sdpa", device, torch.bfloat16, model.layers))
    tokens = torch.randint(96, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    (padded,) = driver.step([(TokenSequence(tokens), 9)], padding=7)
    assert routed
    for index in routed:
        assert (index[:9] < num_experts).all()
        assert (index[9:] == num_experts).all()
    routed.clear()
    plain_driver = PackedDriver(model, make_attention("sdpa", device, torch.bfloat16, model.layers))
    (plain,) = plain_driver.step([(TokenSequence(tokens), 9)])
    assert all((index < num_experts).all() for index in routed)
    torch.testing.assert_close(padded, plain, rtol=0.05, atol=0.05)


def test_a_watcher_sees_where_live_rows_go(device: torch.device, routed: list[torch.Tensor]) -> None:
    model = moe_model("qwen3_moe", device)
    driver = CountingDriver(model, make_attention("sdpa", device, torch.bfloat16, model.layers))
    seen: list[tuple[torch.Tensor, int]] = []
    routed.clear()
    with watch_routing(lambda chosen, num_experts: seen.append((chosen.clone(), num_experts))):
        driver.step([(TokenSequence([1, 2, 3]), 3)], padding=2)
    driver.step([(TokenSequence([1, 2, 3]), 3)], padding=2)
    num_experts = {module.num_experts for module in model.module.modules() if hasattr(module, "gate_up_proj")}
    assert seen
    assert 2 * len(seen) == len(routed)
    for (chosen, of), index in zip(seen, routed, strict=False):
        assert {of} == num_experts
        assert torch.equal(chosen, index[:3])


def test_a_step_of_another_size_is_a_bug(device: torch.device) -> None:
    model = moe_model("qwen3_moe", device)
    driver = CountingDriver(model, make_attention("sdpa", device, torch.bfloat16, model.layers))
    step, ids, positions = driver.prepare([(TokenSequence([1, 2, 3]), 3)], 2, "prefill")
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    ids, positions = (torch.tensor(values[:4], device=device) for values in (ids, positions))
    with use_step(driver.attention.plan(step)), pytest.raises(AssertionError, match="4 rows in a step of 5"):
        model.forward(ids, positions, rows)


@pytest.mark.parametrize("name", [name for name in MOE_NAMES if name != "gpt_oss"])
def test_our_kernels_give_the_logits_of_the_model(name: str) -> None:
    """In float32, padded too; where there is no GPU in Triton's interpreter."""
    pytest.importorskip("triton")
    tokens = torch.randint(96, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = {}
    for experts in (TRITON, "batched_mm"):
        torch.manual_seed(0)
        model = moe_model(name, DEVICE, experts, torch.float32)
        for padding, driver_class in ((0, PackedDriver), (7, CountingDriver)):
            driver = driver_class(model, make_attention("sdpa", DEVICE, torch.float32, model.layers))
            (logits[experts, padding],) = driver.step([(TokenSequence(tokens), 9)], padding=padding)
    for padding in (0, 7):
        torch.testing.assert_close(logits[TRITON, padding], logits["batched_mm", 0], rtol=1e-3, atol=1e-3)


def test_experts_that_our_kernels_do_not_compute_are_named() -> None:
    refused = {name: triton_refusals(moe_model(name, torch.device("cpu")).module) for name in MOE_NAMES}
    assert refused == {
        "qwen3_moe": [],
        "gpt_oss": ["gates and up projections take turns in their weights"],
        "deepseek_v3": [],
        "glm4_moe": [],
    }

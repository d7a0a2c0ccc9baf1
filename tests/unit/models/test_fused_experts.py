"""Our experts in compiled blocks: parts of a piece, with the live rows of the step at hand, and seen by watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from breakgraph.attention import make_attention, use_step
from breakgraph.backends import make_backend
from breakgraph.graph import PlanFamily
from breakgraph.models import HFModel, fuse, fusion, rewrites
from breakgraph.models.expert_ops import added_experts
from breakgraph.models.experts import TRITON
from breakgraph.models.live_rows import give_live_count, live_count
from breakgraph.models.routing import watch_routing
from breakgraph.runners import DecodeRunner, PrefillRunner, Runner
from packed_driver import CountingDriver, PackedDriver, TokenSequence
from tiny_models import VOCAB_SIZE, tiny_model
from triton_device import DEVICE
from unit.runners.fakes import make_batch, make_decode_spec, make_prefill_spec

Seen = list[tuple[Tensor, int]]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


def model_of(name: str, fused: bool) -> HFModel:
    model = HFModel(tiny_model(name, "breakgraph", experts=TRITON).to(DEVICE), name)
    if fused:
        fuse(model)
    return model


def drive(model: HFModel, driver: type[PackedDriver]) -> PackedDriver:
    return driver(model, make_attention("sdpa", DEVICE, torch.float32, model.layers))


def driver_of(name: str, fused: bool, driver: type[PackedDriver] = CountingDriver) -> PackedDriver:
    return drive(model_of(name, fused), driver)


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_a_block_with_experts_is_traced_in_as_many_pieces_as_one_without() -> None:
    counted = []
    for name in ("qwen3", "qwen3_moe"):
        torch._dynamo.reset()
        counters.clear()
        driver_of(name, True, PackedDriver).step([(TokenSequence(tokens(3)), 3)], padding=2)
        counted.append(graphs())
    assert counted[0] == counted[1] > 0


def test_padding_is_traced_once_more_and_its_amount_never() -> None:
    model = model_of("qwen3_moe", True)  # one for both: each has code of its own
    plain, counting = (drive(model, driver) for driver in (PackedDriver, CountingDriver))
    plain.step([(TokenSequence(tokens(3)), 3)])
    pieces = graphs()
    counting.step([(TokenSequence(tokens(3)), 3)], padding=1)
    assert graphs() == pieces + 1
    for count, padding in ((2, 7), (5, 0), (1, 1)):
        counting.step([(TokenSequence(tokens(count)), count)], padding=padding)
        plain.step([(TokenSequence(tokens(5)), count)], padding=padding)
    assert graphs() == pieces + 1
    for driver in (plain, counting):  # a step of one row
        driver.step([(TokenSequence(tokens(1)), 1)])
    assert graphs() <= 2 * (pieces + 1)


@pytest.mark.parametrize(
    ("name", "driver"),
    [("qwen3_moe", PackedDriver), ("qwen3_moe", CountingDriver), ("deepseek_v3", CountingDriver)],
)
def test_numbers_and_routing_are_those_of_the_plain_model(name: str, driver: type[PackedDriver]) -> None:
    seen: dict[bool, Seen] = {False: [], True: []}
    logits: dict[bool, list[Tensor]] = {False: [], True: []}
    for fused in (False, True):
        driven = driver_of(name, fused, driver)
        work = [TokenSequence(tokens(count)) for count in (12, 7)]
        with watch_routing(lambda chosen, of, note=seen[fused]: note.append((chosen.clone(), of))):
            for counts, padding, phase in (((4, 5), 3, "prefill"), ((2, 1), 4, "prefill"), ((1, 1), 2, "decode")):
                logits[fused] += driven.step(list(zip(work, counts, strict=True)), padding=padding, phase=phase)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*logits.values(), strict=True))
    rows = [12, 7, 4] if driver is PackedDriver else [9, 3, 2]
    layers = len(seen[False]) // 3
    assert layers
    assert [len(chosen) for chosen, _ in seen[True]] == [count for count in rows for _ in range(layers)]
    for (chosen, of), (expected, expected_of) in zip(*seen.values(), strict=True):
        assert torch.equal(chosen, expected)
        assert of == expected_of == 8
    reasons = [reason for reason in counters["graph_break"] if "torch.compiler.disable" not in reason]
    assert reasons == []


def runner_of(model: HFModel, phase: str, family: PlanFamily) -> Runner:
    attention = make_attention("sdpa", DEVICE, torch.float32, model.layers, block_size=4)
    PackedDriver(model, attention)  # binds it to a cache
    runner_class, spec = {
        "prefill": (PrefillRunner, make_prefill_spec(max_num_batched_tokens=8, buckets=(4, 8))),
        "decode": (DecodeRunner, make_decode_spec(max_num_seqs=4, buckets=(2, 4))),
    }[phase]

    def forward(fields: Any) -> Tensor:
        return model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])

    return runner_class(spec, make_backend("breakable", family), forward, attention, DEVICE)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_captured_steps_of_one_bucket_have_live_rows_of_their_own(phase: str) -> None:
    steps = ((5, 2), (3,), (8,)) if phase == "prefill" else ((1, 1), (1,), (1, 1, 1, 1))
    with PlanFamily(DEVICE) as family:
        models = (model_of("qwen3_moe", fused) for fused in (False, True))
        plain, fused = (runner_of(model, phase, family) for model in models)
        plain.allocate()
        fused.allocate()
        fused.warm_up()
        fused.capture()
        traced = graphs()
        for sizes in steps:
            batch = make_batch([(0, size) for size in sizes])
            family.poison()
            logits = fused.run_replay(batch).clone()
            torch.testing.assert_close(logits, plain.run_padded_eager(batch), rtol=1e-4, atol=1e-4)
            assert torch.equal(logits, fused.run_padded_eager(batch))
        assert graphs() == traced
        fused.close()
        plain.close()


def test_a_scan_finds_nothing_in_compiled_blocks() -> None:
    driver = driver_of("qwen3_moe", True)
    step, ids, positions = driver.prepare([(TokenSequence(tokens(3)), 3)], 2, "prefill")
    inputs = [torch.tensor(values, device=DEVICE) for values in (ids, positions, range(5))]
    with torch.no_grad(), PlanFamily(DEVICE) as family, use_step(driver.attention.plan(step)):
        plan = family.capture(lambda: driver.model.forward(*inputs), on_hazard="raise")
        assert torch.equal(plan.replay(), driver.model.forward(*inputs))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Inductor compiles what is fused, on a CPU too. Of each graph with experts: whether they add the residual."""
    options, block = fusion._inductor_options(), fusion._CompiledBlock
    found: list[int] = []
    inner: Callable[..., None] = rewrites._add_to_experts

    def spy(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        inner(graph, node)
        found.append(len(graph.find_nodes(op="call_function", target=added_experts)))

    monkeypatch.setattr(rewrites, "_add_to_experts", spy)
    monkeypatch.setattr(fusion, "_CompiledBlock", lambda module, *_: block(module, "inductor", options))
    # What is cached was rewritten earlier.
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


@pytest.mark.parametrize(("name", "expected"), [("qwen3_moe", [1, 1]), ("glm4_moe", [0, 0])])
def test_inductor_adds_the_residual_where_experts_combine(name: str, expected: list[int], sums: list[int]) -> None:
    """With shared experts it adds all of it itself."""
    logits = {}
    for fused in (False, True):
        drivers = [driver_of(name, fused, driver) for driver in (PackedDriver, CountingDriver)]
        logits[fused] = [
            driver.step([(TokenSequence(tokens(3)), 3)], padding=padding)[0]
            for driver in drivers for padding in (2, 5)
        ]  # fmt: skip
    for one, other in zip(*logits.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert sums == expected  # without padding, and with


def test_traced_code_finds_the_count_of_its_own_thread() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def add_count(x: Tensor) -> Tensor:
        count = live_count(4)
        return x if count is None else x + count

    x = torch.zeros(4)

    def with_count(number: int | None) -> float:
        with give_live_count(None if number is None else torch.tensor([number], dtype=torch.int32)):
            with ThreadPoolExecutor(1) as other:
                assert other.submit(add_count, x).result().sum() == 0
            return float(add_count(x)[0])

    assert [with_count(number) for number in (3, None, 7, 5)] == [3, 0, 7, 5]
    assert len(compiled) == 2  # one graph for all counts, which are an argument of it
    with pytest.raises(ZeroDivisionError), give_live_count(torch.ones(1)):
        1 / 0  # noqa: B018
    assert float(add_count(x)[0]) == 0

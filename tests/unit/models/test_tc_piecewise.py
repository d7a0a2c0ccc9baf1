"""Models traced as a whole and captured in pieces: the bits of eager, one trace for all sizes, one break a layer.

Inductor's kernels round differently: their logits stay within TOLERANCE of eager's largest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from breakgraph.attention import make_attention, use_step
from breakgraph.backends import Backend, make_backend
from breakgraph.errors import UntraceableError
from breakgraph.graph import PlanFamily, ShapeKey
from breakgraph.graph.tracing import whole_trace
from breakgraph.models import HFModel, fuse
from packed_driver import PackedDriver, TokenSequence
from tiny_models import VOCAB_SIZE, tiny_model

NAMES = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
TOLERANCE = 1e-5
SIZES = (12, 9, 7)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


class Steps:
    """One prefill step a bucket, of one sequence and four rows of padding, on fixed inputs."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.model = HFModel(tiny_model(name, "breakgraph").to(device), name)
        self.attention = make_attention("sdpa", device, torch.float32, self.model.layers)
        self.driver = PackedDriver(self.model, self.attention)
        self.device = device
        self.family = PlanFamily(device)
        self.forwards: dict[int, Callable[[], Tensor]] = {}
        self.steps: dict[int, object] = {}
        self.inputs: dict[int, Tensor] = {}

    def capture(self, backend: Backend, size: int) -> None:
        sequence = TokenSequence([0] * size)
        self.steps[size], ids, positions = self.driver.prepare([(sequence, size)], 4, "prefill")
        fields = [torch.tensor(values, device=self.device) for values in (ids, positions, range(size + 4))]
        self.inputs[size] = fields[0]
        self.forwards[size] = lambda: self.model.forward(*fields)
        with torch.no_grad(), use_step(self.attention.plan(self.steps[size])):
            backend.capture(ShapeKey("prefill", size), self.forwards[size])

    def run(self, backend: Backend, size: int) -> tuple[Tensor, Tensor]:
        """Logits of a replay in poisoned memory, and of the forward as Python, on new tokens."""
        self.inputs[size].copy_(torch.randint(VOCAB_SIZE, (size + 4,), device=self.device))
        with torch.no_grad():
            with use_step(self.attention.plan(self.steps[size])):
                expected = self.forwards[size]()
            self.family.poison()
            with use_step(self.attention.plan(self.steps[size])):
                return backend.replay(ShapeKey("prefill", size)).clone(), expected


@pytest.fixture
def steps_of(device: torch.device) -> Iterator[Callable[[str], Steps]]:
    made: list[Steps] = []

    def make(name: str) -> Steps:
        made.append(Steps(name, device))
        return made[-1]

    yield make
    for steps in made:
        steps.family.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_the_bits_of_eager(name: str, steps_of: Callable[[str], Steps]) -> None:
    steps = steps_of(name)
    backend = make_backend("tc_piecewise", steps.family)
    for size in SIZES:
        steps.capture(backend, size)
    for size in (*SIZES, *SIZES):
        got, expected = steps.run(backend, size)
        assert torch.equal(got, expected)
    for report in backend.explain().values():
        assert [step.name for step in report.steps if step.kind == "break"] == ["attend", "attend"]
        assert report.compile_sec > 0
    assert counters["stats"]["unique_graphs"] == 1, "one trace serves every size"


@pytest.mark.parametrize("name", NAMES)
def test_inductor_stays_within_the_tolerance_and_equals_its_own_code(
    name: str, steps_of: Callable[[str], Steps]
) -> None:
    steps = steps_of(name)
    backend = make_backend("tc_piecewise_inductor", steps.family)
    for size in SIZES[:2]:
        steps.capture(backend, size)
    for size in SIZES[:2]:
        got, expected = steps.run(backend, size)
        assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
        reference = backend.reference(ShapeKey("prefill", size), steps.forwards[size])
        assert reference is not steps.forwards[size]
        with torch.no_grad(), use_step(steps.attention.plan(steps.steps[size])):
            assert torch.equal(got, reference())
    assert {report.num_breaks for report in backend.explain().values()} == {2}
    assert counters["stats"]["unique_graphs"] == 1


def test_fused_layers_are_refused_and_leave_other_models_alone(steps_of: Callable[[str], Steps]) -> None:
    fused, plain = steps_of("llama"), steps_of("llama")
    fuse(fused.model)
    with pytest.raises(UntraceableError, match="holds layers that are compiled already"):
        fused.capture(make_backend("tc_piecewise", fused.family), 8)
    # What fusion hides from Dynamo is in sight again where a forward is traced as a whole, and hidden afterwards.
    backend = make_backend("tc_piecewise", plain.family)
    plain.capture(backend, 8)
    assert torch.equal(*plain.run(backend, 8))
    breakable = make_backend("breakable", fused.family)
    fused.capture(breakable, 8)
    got, expected = fused.run(breakable, 8)
    assert torch.equal(got, expected)


def test_a_model_is_loaded_while_another_thread_traces(device: torch.device) -> None:
    model = tiny_model("llama", "breakgraph").to(device)

    def load() -> list[tuple[object, ...]]:
        return [dataclasses.astuple(layer) for layer in HFModel(model, "llama").layers]

    expected = load()
    with whole_trace(), ThreadPoolExecutor(1) as other:
        assert other.submit(load).result() == expected

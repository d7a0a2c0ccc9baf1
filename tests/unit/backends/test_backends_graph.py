"""The capturing backends on the real capture library, on every device that is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from breakgraph.backends import make_backend
from breakgraph.graph import PlanFamily, ShapeKey, eager_on_graph

CAPTURING = ("breakable", "debug_eager", "full", "tc_piecewise")
SMALL, LARGE = ShapeKey("toy", 2), ShapeKey("toy", 4)


class Toy:
    """A forward with one break; counts how often Python ran the forward and the break."""

    def __init__(self, device: torch.device) -> None:
        self.x_buf = torch.ones(4, 3, device=device)
        self.weight = torch.arange(9.0, device=device).view(3, 3) / 9
        self.num_forwards = 0
        self.num_breaks = 0

    @eager_on_graph
    def middle(self, hidden: Tensor) -> Tensor:
        self.num_breaks += 1
        return hidden.cumsum(0)

    def forward(self, size: int) -> Tensor:
        self.num_forwards += 1
        return torch.tanh(self.middle(self.x_buf[:size] @ self.weight) - 0.5)

    def expected(self, size: int) -> Tensor:
        return torch.tanh((self.x_buf[:size] @ self.weight).cumsum(0) - 0.5)


@pytest.fixture
def toy(device: torch.device) -> Toy:
    return Toy(device)


@pytest.fixture
def family(device: torch.device) -> Iterator[PlanFamily]:
    with PlanFamily(device) as family:
        yield family


@pytest.mark.parametrize("name", CAPTURING)
def test_replays_read_the_values_of_now(name: str, toy: Toy, family: PlanFamily) -> None:
    backend = make_backend(name, family)
    backend.capture(LARGE, lambda: toy.forward(4))
    backend.capture(SMALL, lambda: toy.forward(2))
    for value in (2.0, -1.0):
        toy.x_buf.fill_(value)
        for key in (LARGE, SMALL):
            family.poison()
            assert torch.equal(backend.replay(key), toy.expected(key.size))
    backend.release(LARGE)
    assert torch.equal(backend.replay(SMALL), toy.expected(2))
    backend.capture(LARGE, lambda: toy.forward(4))
    assert torch.equal(backend.replay(LARGE), toy.expected(4))


@pytest.mark.parametrize(
    ("name", "forwards_per_replay", "breaks_per_replay"),
    [("breakable", 0, 1), ("debug_eager", 1, 1), ("full", 0, 0), ("tc_piecewise", 0, 1)],
)
def test_what_runs_as_python_on_a_replay(
    name: str, forwards_per_replay: int, breaks_per_replay: int, toy: Toy, family: PlanFamily
) -> None:
    backend = make_backend(name, family)
    backend.capture(SMALL, lambda: toy.forward(2))
    toy.num_forwards = toy.num_breaks = 0
    for _ in range(3):
        backend.replay(SMALL)
    assert (toy.num_forwards, toy.num_breaks) == (3 * forwards_per_replay, 3 * breaks_per_replay)


def test_backends_on_one_family_do_not_disturb_each_other(toy: Toy, family: PlanFamily) -> None:
    backends = [make_backend(name, family) for name in CAPTURING]
    for backend in backends:
        backend.capture(LARGE, lambda: toy.forward(4))
    for value in (3.0, 0.5):
        toy.x_buf.fill_(value)
        for backend in backends:
            assert torch.equal(backend.replay(LARGE), toy.expected(4))
    backends[0].close()
    assert torch.equal(backends[1].replay(LARGE), toy.expected(4))


@pytest.mark.parametrize("name", CAPTURING)
def test_state_is_put_back_after_the_capture(name: str, family: PlanFamily, device: torch.device) -> None:
    counter = torch.zeros(1, device=device)
    backend = make_backend(name, family)
    backend.capture(SMALL, lambda: counter.add_(1) * 1, (counter,))
    assert counter.item() == 0
    assert [backend.replay(SMALL).item() for _ in range(3)] == [1, 2, 3]

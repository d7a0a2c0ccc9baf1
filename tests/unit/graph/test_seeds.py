"""A function that seeds the random generator draws the same numbers at every call, and its replay would not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import breakgraph
from breakgraph.errors import HazardError, UncapturableOpError
from breakgraph.graph import PlanFamily, eager_on_graph

SAID = "a random generator cannot be captured: it is seeded, or set to a state"


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def seeds_the_generator(x: Tensor) -> Tensor:
    generator = torch.cuda.default_generators[0] if x.is_cuda else torch.default_generator
    generator.manual_seed(0)
    return F.dropout(x)


def seeds_for_a_while(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return x + torch.rand_like(x)


def seeds_behind_all_draws(x: Tensor) -> Tensor:
    x = x + torch.rand_like(x)
    torch.manual_seed(0)
    return x


SEEDING = (seeds, seeds_the_generator, seeds_for_a_while, seeds_behind_all_draws)
EACH = pytest.mark.parametrize("fn", SEEDING, ids=lambda fn: fn.__name__)


@EACH
def test_a_seed_in_the_captured_function_is_refused(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)  # the seed that it sets, which alone would not show
    before = torch.get_rng_state()
    with torch.no_grad(), pytest.raises(HazardError, match=SAID) as caught:
        breakgraph.capture(fn, torch.ones(4, device=device))
    assert torch.equal(torch.get_rng_state(), before)
    (hazard,) = caught.value.report.blocking
    assert hazard.kind == "unregistered generator"
    if fn is not seeds_behind_all_draws:
        assert hazard.source.startswith(__file__)
        assert hazard.source.endswith(f" in {fn.__name__}")


@EACH
def test_without_a_scan_the_capture_refuses_it(fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(5)
    x, before = torch.ones(4), torch.get_rng_state()
    with PlanFamily("cpu") as family, torch.no_grad():
        with pytest.raises(UncapturableOpError, match=f"{SAID}.*{__file__}"):
            family.capture(lambda: fn(x))
        assert torch.equal(torch.get_rng_state(), before)
        plan = family.capture(lambda: F.dropout(x))
        torch.manual_seed(7)
        replayed = plan.replay().clone()
        torch.manual_seed(7)
        assert torch.equal(replayed, F.dropout(x))


@pytest.mark.parametrize("breaks", [1, 2])
def test_a_break_may_seed(device: torch.device, breaks: int) -> None:
    seeded = eager_on_graph(seeds)

    def fn(x: Tensor) -> Tensor:
        for _ in range(breaks):
            x = seeded(F.dropout(x))
        return x + torch.rand_like(x)

    x = torch.ones(4, device=device)
    torch.manual_seed(3)
    with torch.no_grad(), breakgraph.capture(fn, x) as graph:
        assert torch.initial_seed() == 3
        replayed = graph.replay().clone()
        torch.manual_seed(3)
        assert torch.equal(replayed, fn(x))

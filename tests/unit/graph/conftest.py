"""Fixtures for the capture library: a family on each device, and a way to replay under poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from breakgraph.graph import Plan, PlanFamily


@pytest.fixture
def family(device: torch.device) -> Iterator[PlanFamily]:
    """An empty family, closed afterwards."""
    made = PlanFamily(device)
    yield made
    made.close()


@pytest.fixture
def replay(family: PlanFamily) -> Callable[[Plan], object]:
    """Replays a plan after every free byte of the pool was filled with NaN patterns."""

    def run(plan: Plan) -> object:
        family.poison()
        return plan.replay()

    return run

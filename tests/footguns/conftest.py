"""A plan family on each device, and a replay in memory that was filled with NaN patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from breakgraph.graph import Plan, PlanFamily


@pytest.fixture
def family(device: torch.device) -> Iterator[PlanFamily]:
    made = PlanFamily(device)
    yield made
    made.close()


@pytest.fixture
def replay(family: PlanFamily) -> Callable[[Plan], object]:
    def run(plan: Plan) -> object:
        family.poison()
        return plan.replay()

    return run

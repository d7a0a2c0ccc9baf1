"""Fixtures for every test: the devices present, a plan family on them, a clean environment, a fixed torch seed.

Warnings are errors through `filterwarnings` in pyproject.toml.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from breakgraph.graph import Plan, PlanFamily, heap

if not torch.cuda.is_available():
    # Read when triton is first imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: tests run beside others on few cores, and none asserts on the clock.
hypothesis.settings.register_profile("breakgraph", deadline=None, print_blob=True)
hypothesis.settings.load_profile("breakgraph")

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Every capture collects garbage: what was imported by now need not be walked each time."""
    gc.collect()
    modules = heap.all_modules()
    gc.freeze()
    heap.remember(modules)


def pytest_sessionfinish() -> None:
    """At the interpreter's end libraries tell of frozen objects as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine; session scope, so that hypothesis tests may use it."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BREAKGRAPH_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def torch_seed() -> int:
    """The seed every test starts with; name it to build generators from it."""
    torch.manual_seed(0)
    return 0


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

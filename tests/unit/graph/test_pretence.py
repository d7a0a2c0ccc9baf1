"""Code that asks torch whether it is being captured takes the captured path in every run that stands for a capture."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import HazardError

TRUTH = torch.cuda.is_current_stream_capturing


def is_captured() -> bool:
    """As libraries ask: builds of torch without CUDA have no answer."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


class Masked(nn.Module):
    """Leaves the mask out where nothing is masked, unless a stream is captured: as models of `transformers` do."""

    def __init__(self, told: list[bool]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.asked = breakgraph.eager_on_graph(lambda x: self._ask(told, x))

    @staticmethod
    def _ask(told: list[bool], x: Tensor) -> Tensor:
        told.append(is_captured())
        return x * 2

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.asked(self.proj(x))
        if not is_captured() and bool(mask.all()):
            return x
        return torch.where(mask, x, 0.0)


@pytest.mark.parametrize("backend", ["breakable", "debug_eager"])
def test_a_read_that_captures_leave_out_is_no_hazard(device: torch.device, backend: str) -> None:
    told: list[bool] = []
    model = Masked(told).to(device)
    x, mask = torch.randn(3, 4, device=device), torch.ones(3, 1, dtype=torch.bool, device=device)
    with torch.no_grad(), breakgraph.capture(model, x, mask, backend=backend, verify=True) as captured:
        mask[1] = False
        assert torch.equal(captured.replay(), model(x, mask))
    # What a replay runs as Python is told the truth, whoever runs it.
    assert told
    assert not any(told)
    assert torch.cuda.is_current_stream_capturing is TRUTH


def test_marked_calls_of_a_full_graph_are_in_it(device: torch.device) -> None:
    told: list[bool] = []
    model = Masked(told).to(device)
    x, mask = torch.randn(3, 4, device=device), torch.ones(3, 1, dtype=torch.bool, device=device)
    with torch.no_grad(), breakgraph.capture(model, x, mask, backend="full", verify=True) as captured:
        assert torch.equal(captured.replay(), model(x, mask))
    warm_up, *others = told[:-1]
    assert not warm_up
    assert all(others)


def test_other_threads_are_told_the_truth(device: torch.device) -> None:
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        told.put(is_captured())

    def fn(x: Tensor) -> Tensor:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return x + 1

    with torch.no_grad(), breakgraph.capture(fn, torch.randn(3, device=device)):
        assert told.qsize() >= 3
        assert not any(told.get() for _ in range(told.qsize()))


def test_after_a_failure_everybody_is_told_the_truth(device: torch.device) -> None:
    def fails(x: Tensor) -> Tensor:
        return x + float(x[0])

    with torch.no_grad(), pytest.raises(HazardError):
        breakgraph.capture(fails, torch.randn(3, device=device))
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        breakgraph.capture(lambda x: x + (1 // 0 if is_captured() else 1), torch.ones(1, device=device))
    assert torch.cuda.is_current_stream_capturing is TRUTH
    assert not is_captured()


@pytest.mark.parametrize("told_by_name", [True, False])
def test_a_break_is_called_as_it_was(device: torch.device, told_by_name: bool) -> None:
    """What wraps a function may fill in keywords that it does not find."""

    def scaled(x: Tensor, factor: float = 2.0, *more: Tensor) -> Tensor:
        return x * factor + sum(more)

    def filled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: object, **kwargs: object) -> Tensor:
            if told_by_name:
                kwargs.setdefault("factor", 3.0)
            return call(*args, **kwargs)

        wrapper.__wrapped__ = call  # type: ignore[attr-defined]
        return wrapper

    marked = breakgraph.eager_on_graph(filled(scaled))
    x = torch.randn(3, device=device)

    def fn(x: Tensor) -> Tensor:
        return marked(x + 1, factor=4.0) if told_by_name else marked(x + 1, 4.0, x, x)

    with torch.no_grad(), breakgraph.capture(fn, x) as captured:
        x.normal_()
        assert torch.equal(captured.replay(), fn(x))

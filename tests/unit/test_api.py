"""The facade: one callable, a pool of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import ClosedError, ConfigError, StaleOutputError, UncapturableOpError, UnknownNameError


@breakgraph.eager_on_graph
def keep_large(x: Tensor) -> Tensor:
    return x * (x.abs() > x.abs().mean().item())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": keep_large(self.inner(x)).tanh(), "x": x + 1}


@pytest.mark.parametrize(("backend", "segments", "breaks"), [("breakable", 2, 1), ("debug_eager", 2, 1)])
def test_a_plain_module(device: torch.device, backend: str, segments: int, breaks: int) -> None:
    model, x = Block().to(device), torch.randn(3, 8, device=device)
    with torch.no_grad(), breakgraph.capture(model, x, backend=backend) as graph:
        x.copy_(torch.randn(3, 8, device=device))
        returned = graph.replay()
        want = model(x)
        assert all(torch.equal(returned[name], want[name]) for name in want)
        assert torch.equal(graph.outputs["y"], want["y"])
        report = graph.explain()
        assert (report.num_segments, report.num_breaks) == (segments, breaks)
        assert graph.pool_bytes > 0


def test_full_records_marked_calls_or_refuses_what_they_do(device: torch.device) -> None:
    model, x = Block().to(device), torch.randn(3, 8, device=device)
    double = breakgraph.eager_on_graph(lambda t: t * 2)
    with torch.no_grad():
        with pytest.raises(UncapturableOpError, match="_local_scalar_dense"):
            breakgraph.capture(model, x, backend="full")
        with breakgraph.capture(lambda t: double(t) + 1, x, backend="full") as graph:
            x.copy_(torch.randn(3, 8, device=device))
            assert torch.equal(graph.replay(), x * 2 + 1)
            assert graph.explain().num_breaks == 0


def test_outputs_before_a_replay_and_after_close(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    with torch.no_grad():
        graph = breakgraph.capture(lambda t: t + 1, x, outputs="copy")
    with pytest.raises(StaleOutputError, match="nothing was replayed"):
        _ = graph.outputs
    kept = graph.replay()
    x.zero_()
    assert not torch.equal(graph.replay(), kept)
    graph.close()
    graph.close()
    for use in (graph.replay, graph.explain, lambda: graph.outputs):
        with pytest.raises(ClosedError, match="capture it again"):
            use()


def test_state_is_left_as_it_was(device: torch.device) -> None:
    x, total = torch.ones(3, device=device), torch.zeros(3, device=device)
    with torch.no_grad(), breakgraph.capture(lambda t: total.add_(t) * 1, x, state=(total,)) as graph:
        assert graph.replay().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(1),), {"backend": "fast"}, UnknownNameError, "known: auto, breakable, debug_eager, eager, full"),
        ((torch.ones(1),), {"backend": "eager"}, ConfigError, "capturing backend"),
        ((), {}, ConfigError, "got no tensor"),
        ((torch.ones(1), torch.ones(1, device="meta")), {}, ConfigError, "got cpu, meta"),
        ((torch.ones(1),), {"outputs": "keep"}, ConfigError, "borrow"),
    ],
)
def test_bad_calls(
    arguments: tuple[Tensor, ...], options: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        breakgraph.capture(lambda *t: t[0] + 1, *arguments, **options)


def test_printing_a_tensor_is_a_host_read(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    with torch.no_grad(), pytest.raises(UncapturableOpError, match=r"__(repr|format)__"):
        breakgraph.capture(lambda t: (f"{t}", t + 1)[1], x)

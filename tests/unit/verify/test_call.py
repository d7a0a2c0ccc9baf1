"""`capture(verify=True)`: what is right passes and leaves no trace, each planted fault is named."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import ClosedError, UnwrittenReadError, VerificationError
from breakgraph.verify import Verdict, VerifyReport


@breakgraph.eager_on_graph
def double(x: Tensor) -> Tensor:
    return x * 2


class Block(nn.Module):
    """A linear layer, a break, and a norm below a container."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tail(double(self.up(x)))
        return y


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 8, device=device)


def wrong_report(fn: Callable[..., object], *inputs: object, **options: object) -> VerifyReport:
    with torch.no_grad(), pytest.raises(VerificationError) as caught:
        breakgraph.capture(fn, *inputs, verify=True, **options)  # type: ignore[arg-type]
    report = caught.value.report
    assert isinstance(report, VerifyReport)
    assert str(report) in str(caught.value)
    assert max(map(len, str(report).splitlines())) <= 80
    return report


@pytest.mark.parametrize("backend", ["breakable", "full", "debug_eager"])
def test_what_is_right_is_equal(x: Tensor, backend: str) -> None:
    model = Block().to(x.device)
    with torch.no_grad(), breakgraph.capture(model, x, backend=backend, verify=True) as graph:
        report = graph.verify()
        assert [step.verdict for step in report.steps] == [Verdict.EQUAL] * 3
        assert report.ok
        assert report.culprit is None
        assert str(report) == "capture: 3 equal"
        assert torch.equal(graph.replay(), model(x))


def test_inputs_state_and_random_numbers_are_left_as_they_were(x: Tensor) -> None:
    total = torch.zeros(8, device=x.device)
    ids = torch.tensor([0, 3, 3, 7], device=x.device)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        total.add_(x.sum(0))
        x.mul_(0.5)
        return double(total[ids]) + torch.rand(4, device=x.device)

    with torch.no_grad(), breakgraph.capture(step, x, ids, state=[total], verify=True) as graph:
        before = x.clone()
        torch.manual_seed(5)
        want = torch.rand(4, device=x.device)
        torch.manual_seed(5)
        assert graph.verify().ok
        assert torch.equal(torch.rand(4, device=x.device), want)
        assert torch.equal(x, before)
        assert total.tolist() == [0.0] * 8
        assert ids.tolist() == [0, 3, 3, 7]


def test_a_stale_break_is_named(x: Tensor) -> None:
    calls = {"replay": False}

    @breakgraph.eager_on_graph
    def stale(x: Tensor) -> Tensor:
        return x + 1 if calls["replay"] else x + 0

    def watch_out(x: Tensor) -> Tensor:
        calls["replay"] = False  # Python of the forward: not there at a replay
        y = stale(double(x).sin())
        calls["replay"] = True
        return y.cos()

    report = wrong_report(watch_out, x)
    assert report.culprit is not None
    assert report.culprit.segment is None
    assert "stale" in str(report.culprit.break_name)
    assert "reads values" in report.culprit.hint


def test_a_stale_break_that_writes_in_place_is_told_from_the_segment_before_it(x: Tensor) -> None:
    """What it writes held anything before: that alone does not put the blame on the operators."""
    calls = {"replay": False}

    @breakgraph.eager_on_graph(mutates=("out",))
    def stale(x: Tensor, out: Tensor) -> None:
        out.copy_(x + 1 if calls["replay"] else x)

    def forward(x: Tensor) -> Tensor:
        calls["replay"] = False
        y = double(x).sin()
        out = torch.empty_like(y)
        stale(y, out)
        calls["replay"] = True
        return out.cos()

    report = wrong_report(forward, x)
    assert report.culprit is not None
    assert report.culprit.segment is None
    assert "stale" in str(report.culprit.break_name)


@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_a_number_that_python_took_from_the_inputs_is_found_at_its_operator(backend: str) -> None:
    """The first values decide a number, which the graph then holds: the input is read behind the recorder's back."""
    model, x = Block(), torch.randn(4, 8)
    scale = {"of": 1.0}

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Identity(), Times(lambda: scale["of"])])

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner[1](double(model.up(x)))
            return y.tanh()

    class Follow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            scale["of"] = first_element(number)
            y: Tensor = self.scaled(x)
            return y

    number = torch.full((1,), 2.0)
    report = wrong_report(Follow(), x, number, backend=backend)
    assert report.steps[0].verdict is Verdict.EQUAL
    assert report.steps[1].verdict is Verdict.DIFFERENT
    culprit = report.culprit
    assert culprit is not None
    assert (culprit.segment, culprit.op, culprit.module) == (
        0 if backend == "full" else 1, "aten.mul.Tensor", "Follow.scaled.inner.1",
    )  # fmt: skip
    assert "test_call.py" in str(culprit.source)
    assert "fixed when the plan was captured" in culprit.hint


class Times(nn.Module):
    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


def first_element(number: Tensor) -> float:
    """What a kernel's launch code does when it reads lengths that are kept on the host."""
    return float(ctypes.cast(number.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])


def test_a_python_value_that_changed_since_the_capture(x: Tensor) -> None:
    rows = {"count": 3}
    with torch.no_grad(), breakgraph.capture(lambda x: double(x).relu()[: rows["count"]].sum(0), x) as graph:
        assert graph.verify().ok
        rows["count"] = 2
        report = graph.verify()
    assert report.culprit is not None
    assert report.culprit.segment == 1
    assert "a Python value that the plan holds has changed since" in report.culprit.hint


def test_another_break_than_the_captured_one(x: Tensor) -> None:
    @breakgraph.eager_on_graph
    def triple(x: Tensor) -> Tensor:
        return x * 3

    chosen = {"break": double}
    with torch.no_grad(), breakgraph.capture(lambda x: chosen["break"](double(x).exp()).neg(), x) as graph:
        chosen["break"] = triple
        report = graph.verify()
    assert report.culprit is not None
    assert (report.culprit.segment, "triple" in str(report.culprit.break_name)) == (1, True)


def test_state_that_is_not_declared_shows_in_the_eager_runs(x: Tensor) -> None:
    count = torch.zeros(1, device=x.device)

    def step(x: Tensor) -> Tensor:
        count.add_(1)
        return double(x) * count

    with torch.no_grad(), breakgraph.capture(step, x) as graph:
        report = graph.verify()
    assert report.steps[0].verdict is Verdict.WITHIN_SPREAD
    assert "state that was not declared" in " ".join(str(report).split())
    with torch.no_grad(), breakgraph.capture(step, x, state=[count]) as graph:
        assert [step.verdict for step in graph.verify().steps] == [Verdict.EQUAL] * 3


def test_eager_runs_that_differ_give_the_replay_their_spread(x: Tensor) -> None:
    noise = iter([0.0, 1e-3, 2e-3, 0.0, 1e-3] * 100)

    @breakgraph.eager_on_graph
    def noisy(x: Tensor) -> Tensor:
        return x + next(noise)

    with torch.no_grad(), breakgraph.capture(lambda x: noisy(x).neg(), x, verify=True) as graph:
        report = graph.verify()
    assert {step.verdict for step in report.steps} == {Verdict.WITHIN_SPREAD}
    assert all(step.spread is not None and 5e-4 < step.spread < 5e-3 for step in report.steps)
    assert "eager runs differ among themselves" in str(report)


def test_a_break_that_raises_at_replay_is_refused(x: Tensor) -> None:
    width = {"rows": 4}

    @breakgraph.eager_on_graph
    def head(x: Tensor) -> Tensor:
        return x[: width["rows"]].clone()

    with torch.no_grad(), breakgraph.capture(lambda x: head(x.exp()).sum(), x) as graph:
        width["rows"] = 3
        report = graph.verify()
    assert [step.verdict for step in report.steps] == [Verdict.REFUSED]
    assert "ResultMismatchError" in str(report)
    assert report.culprit is not None
    assert "head" in str(report.culprit.break_name)


def test_memory_that_no_segment_fills(x: Tensor) -> None:
    """A buffer whose upper rows nobody writes: eager finds what was there before, the poisoned replay does not."""

    @breakgraph.eager_on_graph(mutates=("out",))
    def fill_live(x: Tensor, out: Tensor) -> None:
        out[:2] = x[:2]

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fill_live(x.exp(), out)
        return out.sum()

    if x.device.type == "cpu":
        with torch.no_grad(), pytest.raises(UnwrittenReadError, match="has not written"):
            breakgraph.capture(forward, x, verify=True)
    else:
        assert wrong_report(forward, x).steps[-1].differences[0].num_non_finite == 1


def test_a_closed_graph_is_not_verified(x: Tensor) -> None:
    graph = breakgraph.capture(lambda x: x + 1, x)
    graph.close()
    with pytest.raises(ClosedError):
        graph.verify()


def test_a_report_is_plain_data(x: Tensor) -> None:
    rows = {"count": 3}
    with torch.no_grad(), breakgraph.capture(lambda x: double(x)[: rows["count"]].sum(0), x) as graph:
        rows["count"] = 2
        found = graph.verify().to_dict()
    assert found["ok"] is False
    assert found["culprit"]["segment"] == 1
    assert found["steps"][0]["verdict"] == "different"
    assert found["steps"][0]["differences"][0]["num_elements"] == 8

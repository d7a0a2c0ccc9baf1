"""Rounds and their spread, on calls that count themselves; and the union of kernel times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from breakgraph.bench.profiler import Event, busy_us, profiled
from breakgraph.bench.timing import Samples, back_to_back, interleaved, one_ahead, paired_ratio, percentile

CPU = torch.device("cpu")


def test_runs_take_turns_and_slow_ones_fewer() -> None:
    order: list[str] = []

    def run(name: str) -> Callable[[], object]:
        return lambda: order.append(name)

    samples = interleaved({"eager": run("e"), "full": run("f")}, rounds=30, device=CPU, fewer=("eager",))
    assert "".join(order) == "ef" * 7 + "f" * 24
    assert {name: len(own.walls) for name, own in samples.items()} == {"eager": 6, "full": 30}
    assert all(host <= wall for own in samples.values() for wall, host in zip(own.walls, own.hosts, strict=True))


def test_few_rounds_are_not_made_more() -> None:
    assert len(interleaved({"eager": lambda: None}, rounds=2, device=CPU, fewer=("eager",))["eager"].walls) == 2


def test_metrics_are_medians_and_percentiles() -> None:
    metrics = Samples([5.0, 1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 9.0, 1.0, 1.0]).metrics()
    values = {name: metric.value for name, metric in metrics.items()}
    assert values == {"time": 3.0, "p10": 1.0, "p90": 5.0, "host": 1.0}
    assert {metric.unit for metric in metrics.values()} == {"ms"}


def test_a_paired_ratio_forgives_rounds_that_were_slow_for_both() -> None:
    assert paired_ratio(Samples([2.0, 20.0, 4.0]), Samples([1.0, 10.0, 2.0])) == 2.0
    assert percentile([1.0], 0.9) == 1.0


def test_the_first_runs_of_a_row_are_not_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([900.0, 800.0, 700.0, 30.0, 20.0, 10.0, 5.0])
    monkeypatch.setattr("breakgraph.bench.timing.timed", lambda run, device: (next(walls), 0.0))
    assert back_to_back(lambda: None, CPU, seconds=2.465) == 15.0


def test_a_step_ahead_is_launched_before_the_last_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one millisecond a step, on a clock of its own."""
    order: list[str] = []
    clock = [0.0]

    def run() -> None:
        order.append("launch")

    def end_of_queue(device: torch.device) -> Callable[[], None]:
        step = sum(what == "launch" for what in order) - 1

        def wait() -> None:
            order.append(f"end {step}")
            clock[0] += 0.001

        return wait

    monkeypatch.setattr("breakgraph.bench.timing._end_of_queue", end_of_queue)
    monkeypatch.setattr("breakgraph.bench.timing.time.perf_counter", lambda: clock[0])
    assert one_ahead(run, CPU, seconds=0.02) == pytest.approx(1.0)
    assert [what.split()[0] for what in order[:5]] == ["launch", "launch", "end", "launch", "end"]
    assert [what for what in order if what.startswith("end")][:3] == ["end 0", "end 1", "end 2"]
    assert order[-1].startswith("end")
    assert order.count(order[-1]) == 1


def kernel(start: float, duration: float, category: str = "kernel") -> Event:
    return Event("k", category, start, duration, "7")


@pytest.mark.parametrize(
    ("events", "busy"),
    [
        ([], 0.0),
        ([kernel(0, 5), kernel(10, 5)], 10.0),
        ([kernel(10, 5), kernel(0, 5)], 10.0),
        ([kernel(0, 10), kernel(2, 3)], 10.0),
        ([kernel(0, 10), kernel(5, 10), kernel(12, 1)], 15.0),
        ([kernel(0, 5), kernel(5, 5, "gpu_memcpy"), kernel(20, 1, "gpu_memset")], 11.0),
        ([kernel(0, 5), kernel(0, 50, "user_annotation")], 5.0),
    ],
)
def test_busy_is_the_union_of_what_the_gpu_did(events: list[Event], busy: float) -> None:
    assert busy_us(events) == busy


def test_the_profiler_gives_named_blocks_in_order() -> None:
    def run() -> None:
        for name in ("first", "second"):
            with torch.profiler.record_function(name):
                torch.ones(8).sum()

    first, second = profiled(run, CPU, host=True)
    assert (first.name, second.name) == ("first", "second")
    assert first.start_us + first.duration_us <= second.start_us
    assert first.track == second.track

"""Wall clocks: synchronised, interleaved, with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from breakgraph.bench.result import Metric

MIN_ROUNDS = 5
"""Of what takes part in a fifth of the rounds only."""


@dataclass
class Samples:
    """Milliseconds of each round: until the results are there, and until the call returned."""

    walls: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.walls)

    def metrics(self) -> dict[str, Metric]:
        """Medians, and the 10th and 90th percentile."""
        values = {
            "time": self.median,
            "p10": percentile(self.walls, 0.1),
            "p90": percentile(self.walls, 0.9),
            "host": statistics.median(self.hosts),
        }
        return {name: Metric(value=value, unit="ms") for name, value in values.items()}


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds until the results are there, and until the host is free."""
    synchronize(device)
    start = time.perf_counter()
    run()
    host = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, (host - start) * 1e3


def synchronize(device: torch.device) -> None:
    """Waits for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, fewer: Collection[str] = ()
) -> dict[str, Samples]:
    """Every run in turn, `rounds` times after one round that is not counted; those in `fewer` in a fifth of them.

    A GPU rests behind each run for as long as the run took: without, large steps heat it to its power limit within a
    few rounds, and what is timed is how far that lowers its clock. :func:`back_to_back` times that.
    """
    samples = {name: Samples() for name in runs}
    few = min(rounds, max(MIN_ROUNDS, rounds // 5))
    for index in range(rounds + 1):
        for name, run in runs.items():
            if name in fewer and index > few:
                continue
            wall, host = timed(run, device)
            if device.type == "cuda":
                _rest(wall / 1e3)
            if index:
                samples[name].walls.append(wall)
                samples[name].hosts.append(host)
    return samples


def _rest(seconds: float) -> None:
    """The GPU's, not the host's: one that slept would do its part of the next step more slowly."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def back_to_back(run: Callable[[], object], device: torch.device, seconds: float = 0.6) -> float:
    """Milliseconds of one run where one follows the other: the median of the second half of so many seconds."""
    walls: list[float] = []
    while len(walls) < MIN_ROUNDS or sum(walls) < seconds * 1e3:
        walls.append(timed(run, device)[0])
    return statistics.median(walls[len(walls) // 2 :])


def one_ahead(run: Callable[[], object], device: torch.device, seconds: float = 0.6) -> float:
    """Milliseconds from the end of one run to the end of the next, which was launched before the first had ended: the
    median of the second half of so many seconds. The engine decodes like that."""
    walls: list[float] = []
    run()
    wait, last = _end_of_queue(device), time.perf_counter()
    while len(walls) < MIN_ROUNDS or sum(walls) < seconds * 1e3:
        run()
        next_wait = _end_of_queue(device)
        wait()
        now = time.perf_counter()
        walls.append((now - last) * 1e3)
        wait, last = next_wait, now
    wait()
    return statistics.median(walls[len(walls) // 2 :])


def _end_of_queue(device: torch.device) -> Callable[[], None]:
    """Waits for what the device has been given by now, and for nothing that comes later."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def paired_ratio(above: Samples, below: Samples) -> float:
    """Median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(above.walls, below.walls, strict=False))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, none interpolated."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def gpu_ms(call: Callable[[], object], device: torch.device, calls: int = 4, rounds: int = 15) -> float:
    """Milliseconds of GPU time of one call: several are queued behind a pause, so that the host is no part of it."""
    call()
    times = []
    with torch.cuda.device(device):
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(_PAUSE_CYCLES)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


_PAUSE_CYCLES = 20_000_000
"""About 10 ms, in which the host queues the calls of a round."""

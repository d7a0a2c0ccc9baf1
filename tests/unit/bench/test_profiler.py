"""What is made of the profiler's events."""

from __future__ import annotations

from breakgraph.bench.profiler import Event, KernelTime, busy_us, kernel_times


def kernel(name: str, start_us: float, duration_us: float, category: str = "kernel") -> Event:
    return Event(name, category, start_us, duration_us, "stream 7")


EVENTS = [
    kernel("gemm", 0, 50), kernel("norm", 40, 20), kernel("gemm", 100, 70), kernel("Memcpy DtoD", 200, 5, "gpu_memcpy"),
    kernel("a break", 0, 500, "user_annotation"),
]  # fmt: skip


def test_overlapping_kernels_count_once() -> None:
    assert busy_us(EVENTS) == 60 + 70 + 5


def test_kernels_by_name_the_longest_first() -> None:
    assert kernel_times(EVENTS, rounds=2) == [
        KernelTime("gemm", 0.06, 1.0), KernelTime("norm", 0.01, 0.5), KernelTime("Memcpy DtoD", 0.0025, 0.5)
    ]  # fmt: skip

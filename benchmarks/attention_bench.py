"""Attention at real sizes: our kernels beside FlashInfer's and torch's, and decode beside the speed of a copy.

    PYTHONPATH=src python3 benchmarks/attention_bench.py --out result.json
    PYTHONPATH=src python3 benchmarks/attention_bench.py --out result.json --sweep   # other tiles of the Triton kernels

32 query and 8 key heads of 128, bfloat16, blocks of 16 tokens. Milliseconds of GPU time a call. The calls of a case go
over inputs that together are several times L2, each in its own tensors. "launched": all calls are queued behind a
pause of the GPU, so that the host is no part of it; "graph": all calls are captured into one CUDA graph. CUDA events
around all of them, the median of many rounds, with the fastest and the slowest.

"attention" is the kernel alone, "forward" what a layer calls: the new keys and values are stored as well. "break" is
what a break of a bucket calls: the segment ahead of it has stored them.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_cases import BLOCK, DEVICE, DTYPE, LAYER, Case, make_case

from breakgraph.attention import make_attention, triton_ops
from breakgraph.attention.flash import FlashAttention
from breakgraph.bench.result import Metric, Result, Row, Shape, here, installed_version, write_result

L2_BYTES = 60 << 20
PAUSE_CYCLES = 20_000_000
"""About 10 ms, in which the host queues the calls of a round."""
KV_BYTES = 2 * LAYER.num_kv_heads * LAYER.head_dim * DTYPE.itemsize
"""Of one token."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Time:
    """Milliseconds of one call."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, rounds: Sequence[float], num_calls: int) -> Time:
        return cls(*(value / num_calls for value in (statistics.median(rounds), min(rounds), max(rounds))))


def launched(calls: Sequence[Call], num_rounds: int = 15) -> Time:
    def once() -> None:
        for call in calls:
            call()

    once()
    return Time.of([_events(once, pause=True) for _ in range(num_rounds)], len(calls))


def in_graph(calls: Sequence[Call], num_rounds: int = 15) -> Time:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    return Time.of([_events(graph.replay, pause=False) for _ in range(num_rounds)], len(calls))


def _events(run: Call, *, pause: bool) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if pause:
        torch.cuda._sleep(PAUSE_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_rows() -> tuple[float, list[Row]]:
    """The best rate of a device to device copy, GB/s read and written, and all that were tried.

    Shown beside it: a kernel that reads and writes as much, and the copy in a graph, a node of its own kind that may go
    to a copy engine.
    """
    best, rows = 0.0, []
    for gib in (1, 2, 4, 8):
        source = torch.empty(gib << 29, dtype=DTYPE, device=DEVICE).normal_()
        target = torch.empty_like(source)
        ways: dict[str, tuple[Callable[[Sequence[Call]], Time], Call]] = {
            "copy, launched": (launched, lambda source=source, target=target: target.copy_(source)),
            "negation, launched": (launched, lambda source=source, target=target: torch.neg(source, out=target)),
            "copy, graph": (in_graph, lambda source=source, target=target: target.copy_(source)),
        }
        for name, (timer, call) in ways.items():
            time = timer([call] * 4)
            rate = 2 * source.nbytes / time.median / 1e6
            best = max(best, rate if name == "copy, launched" else 0.0)
            rows.append(timed_row(name, {"GiB": gib}, time, {"rate": Metric(value=rate, unit="GB/s")}))
        del source, target
    return best, rows


@dataclass(frozen=True)
class Timing:
    phase: str
    num_reqs: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.phase} {self.num_reqs}x{self.length}"

    def cases(self) -> list[Case]:
        """As many as make four times L2 of what a call reads and writes."""
        new = 1 if self.phase == "decode" else self.length
        rows_bytes = new * 2 * LAYER.num_heads * LAYER.head_dim * DTYPE.itemsize
        count = max(1, -(-4 * L2_BYTES // (self.num_reqs * (self.length * KV_BYTES + rows_bytes))))
        lens = ([new] * self.num_reqs, [self.length - new] * self.num_reqs)
        return [make_case(LAYER, *lens, phase=self.phase, seed=seed) for seed in range(count)]

    def rate(self, time: Time, copy_rate: float) -> dict[str, Metric]:
        if self.phase == "decode":
            rate = self.num_reqs * self.length * KV_BYTES / time.median / 1e6
            return {
                "kv_read": Metric(value=rate, unit="GB/s"),
                "of_copy": Metric(value=100 * rate / copy_rate, unit="percent"),
            }
        flop = 4 * LAYER.num_heads * LAYER.head_dim * self.num_reqs * self.length * (self.length + 1) / 2
        return {"compute": Metric(value=flop / time.median / 1e9, unit="TFLOP/s")}


TIMINGS = (
    Timing("decode", 128, 4096), Timing("decode", 32, 2048), Timing("decode", 1, 4096),
    Timing("prefill", 1, 2048), Timing("prefill", 1, 8192),
)  # fmt: skip


def forward(name: str, stored: bool = False) -> Callable[[Case], Call]:
    """The whole of what a layer calls, planned before. Each case has an instance: plans of one replace each other."""

    def call_of(case: Case) -> Call:
        attention = make_attention(name, DEVICE, DTYPE, [LAYER])
        metadata, out = case.plan(attention), case.empty_out()
        if stored:
            attention.forward(case.q, case.k, case.v, LAYER, metadata, out)
        return lambda: attention.forward(case.q, case.k, case.v, LAYER, metadata, out, stored)

    return call_of


def store_only(case: Case) -> Call:
    kv = case.kv
    return lambda: triton_ops.store(case.k, case.v, case.step.slot_mapping_gpu, None, kv.key[0], kv.value[0])


def triton_only(case: Case) -> Call:
    step, out = case.step, case.empty_out()
    cache = (case.kv.key[0], case.kv.value[0], step.block_tables_gpu, step.seq_lens_gpu)
    options = (LAYER.sinks, LAYER.scale, LAYER.softcap, LAYER.window, out)
    if step.phase == "decode":
        arrivals = torch.zeros(case.q.shape[0], LAYER.num_kv_heads, dtype=torch.int32, device=DEVICE)
        return lambda: triton_ops.decode(case.q, *cache, arrivals, *options)
    call = triton_ops.VarlenCall(case.q, *cache[:2], *options, short=False)
    return lambda: call(*cache[2:], step.cu_seqlens_q_gpu)


def flash_only(case: Case) -> Call:
    """torch's operator on the packed keys and values of a prompt without a prefix."""
    attention = FlashAttention([LAYER])
    metadata: Any = case.plan(attention)
    return lambda: attention._operator(
        query=case.q, key=case.k, value=case.v, cum_seq_q=metadata.cu_seqlens_q, cum_seq_k=metadata.cu_seqlens_k,
        max_q=metadata.max_seqlen_q, max_k=metadata.max_seqlen_k, scale=LAYER.scale, window=None,
    )  # fmt: skip


def flashinfer_only(case: Case) -> Call:
    """FlashInfer's wrapper as its documentation uses it: planned before, `run` alone is timed."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    step, out = case.step, case.empty_out()
    counts = [-(-total // BLOCK) for total in step.seq_lens]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(total - 1) % BLOCK + 1 for total in step.seq_lens], dtype=torch.int32)
    pages = torch.cat([row[:count] for row, count in zip(step.block_tables_gpu, counts, strict=True)])
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    heads = (LAYER.num_heads, LAYER.num_kv_heads, LAYER.head_dim, BLOCK)
    options: dict[str, Any] = {"q_data_type": DTYPE, "kv_data_type": DTYPE, "sm_scale": LAYER.scale}
    if step.phase == "decode":
        buffers = (starts.to(DEVICE), pages.clone(), last.to(DEVICE))
        wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", True, True, *buffers, backend="fa2")
        wrapper.plan(starts, pages, last, *heads, **options)
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        indptr = torch.tensor([0, *step.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        wrapper.plan(indptr, starts, pages, last, *heads, causal=True, **options)
    return lambda: wrapper.run(case.q, (case.kv.key[0], case.kv.value[0]), out=out)


def contestants(timing: Timing, with_flashinfer: bool) -> dict[str, Callable[[Case], Call]]:
    ways = {"triton attention": triton_only, "triton forward": forward("triton")}
    if with_flashinfer:
        ways |= {"flashinfer attention": flashinfer_only, "flashinfer forward": forward("flashinfer")}
    if timing.phase == "decode":
        return ways | {"sdpa forward": forward("sdpa"), "flash forward": forward("flash")}
    ways |= {name.replace("attention", "break"): forward(name.split()[0], stored=True) for name in tuple(ways)[::2]}
    return ways | {"flash attention": flash_only, "flash forward": forward("flash"), "store alone": store_only}


@torch.inference_mode()
def time_all(timing: Timing, copy_rate: float, with_flashinfer: bool) -> list[Row]:
    rows, cases = [], timing.cases()
    for name, call_of in contestants(timing, with_flashinfer).items():
        calls = [call_of(case) for case in cases]
        calls *= max(1, 8 // len(calls))
        timers = {"launched": launched}
        # A step of prompts without fixed slots is for breaks; what decodes in breaks only is not for graphs either.
        if timing.phase == "decode" and name != "flash forward":
            timers["graph"] = in_graph
        for how, timer in timers.items():
            time = timer(calls, 5 if name == "sdpa forward" else 15)
            params = {"implementation": name, "how": how, "inputs": len(cases)}
            rows.append(timed_row(timing.name, params, time, timing.rate(time, copy_rate)))
        del calls
    return rows


def timed_row(name: str, params: dict[str, Any], time: Time, more: dict[str, Metric]) -> Row:
    times = {"time": time.median, "fastest": time.fastest, "slowest": time.slowest}
    metrics = {key: Metric(value=value, unit="ms") for key, value in times.items()} | more
    what = " ".join(str(value) for value in params.values())
    print(f"{name:18} {what:34}", *(f"{key} {m.value:.4g} {m.unit}" for key, m in metrics.items()), flush=True)
    return Row(name=name, params=params, metrics=metrics)


def ratios(rows: Sequence[Row], copy_rate: float) -> Row:
    """What the goals are about. A ratio is there if both of its sides were timed."""
    times = {(row.name, row.params.get("implementation"), row.params.get("how")): row.metrics["time"] for row in rows}
    metrics: dict[str, Metric] = {}

    def add(name: str, value: float, goal: str) -> None:
        metrics[name] = Metric(value=value, unit="ratio")
        print(f"{value:8.3f}  {name}{goal and f' (goal {goal})'}", flush=True)

    def ratio(shape: str, how: str, above: str, below: Sequence[str], goal: str = "") -> None:
        needed = [(shape, what, how) for what in (above, *below)]
        if all(key in times for key in needed):
            over, *under = (times[key].value for key in needed)
            add(f"{shape}, {above} / {' and '.join(below)}", over / sum(under), goal)

    rates = [row.metrics["kv_read"].value for row in rows if row.name == "decode 128x4096"]
    add("decode 128x4096, best / copy", max(rates) / copy_rate, "at least 0.85")
    for shape, goal in (("decode 128x4096", "1.25"), ("decode 32x2048", "1"), ("decode 1x4096", "")):
        for what in ("attention", "forward"):
            ratio(shape, "graph", f"triton {what}", [f"flashinfer {what}"], goal)
    for shape in ("prefill 1x2048", "prefill 1x8192"):
        ratio(shape, "launched", "flashinfer break", ["flashinfer attention"], "1.05")
        ratio(shape, "launched", "flashinfer forward", ["flashinfer attention"])
        ratio(shape, "launched", "flashinfer forward", ["flashinfer attention", "store alone"], "1.05")
        ratio(shape, "launched", "triton attention", ["flash attention"], "1")
        ratio(shape, "launched", "triton attention", ["flashinfer attention"])
    return Row(name="ratios", params={}, metrics=metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-flashinfer", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="time other tiles of the Triton kernels too")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not args.skip_flashinfer and importlib.util.find_spec("flashinfer") is None:
        parser.error("flashinfer is not installed: install breakgraph[flashinfer], or give --skip-flashinfer")
    copy_rate, rows = copy_rows()
    torch.cuda.empty_cache()
    for timing in TIMINGS:
        rows += time_all(timing, copy_rate, not args.skip_flashinfer)
        torch.cuda.empty_cache()
    rows.append(ratios(rows, copy_rate))
    if args.sweep:
        from attention_sweep import sweep

        rows += [row for timing in TIMINGS for row in sweep(timing, copy_rate)]
    run, where, versions = here(f"python3 benchmarks/attention_bench.py {' '.join(sys.argv[1:-2])}".strip(), DEVICE)
    fields = {name: getattr(LAYER, name) for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")}
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model=fields, dtype="bfloat16"), rows=tuple(rows),
        notes=(f"flashinfer-python {installed_version('flashinfer-python')}",
               "random queries, keys and values in scattered blocks of 16 tokens; inputs of a case four times L2",
               "launched: calls queued behind a pause of the GPU; graph: calls in one CUDA graph; median of the rounds",
               "of_copy: keys and values read a second over the best rate of a copy, its reads and writes counted",
               "flash decodes through its prefill form, which gathers the cache into one tensor first"),
        excluded=("projections", "host time", "plans"),
    ))  # fmt: skip


if __name__ == "__main__":
    main()

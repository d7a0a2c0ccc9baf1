"""Results made up for the renderers: their figures mean nothing."""

from __future__ import annotations

from pathlib import Path

from breakgraph.bench.result import Metric, Result, Row, Run, Scalar, Shape, Versions, Where, read_result

ROOT = Path(__file__).parents[3]
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
README_FILE = ROOT / "benchmarks" / "results" / "prefill_8b.json"


def ms(value: float) -> Metric:
    return Metric(value=value, unit="ms")


def count(value: int) -> Metric:
    return Metric(value=value, unit="count")


def mib(value: int) -> Metric:
    return Metric(value=value << 20, unit="bytes")


def result(*rows: Row, emulated: bool = False, notes: tuple[str, ...] = ()) -> Result:
    kind = "cpu" if emulated else "gpu"
    return Result(
        run=Run(command="breakgraph bench prefill --tokens 8,16", git_commit=None, started_at="2026-03-01T12:00+00:00"),
        where=Where(device=kind, device_name="Example device", driver=None, emulated=emulated),
        versions=Versions(
            breakgraph="0.1.0", torch="2.11.0", transformers=None, triton=None, python="3.12.3", cuda=None
        ),
        shape=Shape(model="example", dtype="bfloat16"),
        rows=rows,
        notes=notes,
        excluded=("sampling",),
    )


def prefill_row(backend: str, tokens: int, time: float, requests: int = 1, **params: Scalar) -> Row:
    metrics = {"time": ms(time), "p10": ms(time * 0.9), "p90": ms(time * 1.1), "host": ms(0.5)}
    metrics |= {"gpu_busy": ms(1.25 * tokens), "roofline": ms(float(tokens))}
    if backend == "breakable":
        metrics["equals_full"] = Metric(value=False, unit="bool")
    named = {"tokens": tokens, "requests": requests, "backend": backend, "fusion": "none", "attention": "triton"}
    return Row(name="prefill", params=named | params, metrics=metrics)


def prefill_result() -> Result:
    rows = [
        prefill_row(backend, tokens, tokens * factor, requests)
        for tokens in (8, 16)
        for requests in (1, 4)
        for backend, factor in (("full", 1.5), ("breakable", 1.6), ("eager", 20.0))
    ]
    peer = prefill_row("torch.compile, body only", 8, 14.0, fusion="inductor", attention="sdpa")
    return result(*rows, peer, notes=("<b>not bold</b> | not a cell",))


def capture_result(*, emulated: bool = False) -> Result:
    arm: dict[str, Scalar] = {"backend": "breakable", "fusion": "none", "attention": "triton"}
    rows = [Row(name="capture", params=arm, metrics={"buckets": count(3), "pool": mib(40)})]
    for phase, bucket, size in (("prefill", 16, 36), ("prefill", 4, 9), ("decode", 2, 5)):
        params = arm | {"phase": phase, "bucket": bucket}
        rows.append(Row(name="bucket", params=params, metrics={"activations": mib(size), "pool_growth": mib(0)}))
    for index, (kind, name) in enumerate((("segment", "0"), ("break", "attend"), ("segment", "1"))):
        metrics = {"nodes": count(0 if kind == "break" else 7)}
        if not emulated:
            metrics["host"] = Metric(value=20.0 + index, unit="us")
        params = arm | {"phase": "prefill", "bucket": 16, "index": index, "kind": kind, "step": name}
        rows.append(Row(name="step", params=params, metrics=metrics))
    return result(*rows, emulated=emulated)


def committed(path: Path = README_FILE) -> Result:
    return read_result(path)

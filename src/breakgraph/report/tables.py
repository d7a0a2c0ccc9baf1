"""From the rows of a result to tables of text, which every format shows in its own way."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from breakgraph.bench.result import Metric, Result, Row, Scalar
from breakgraph.report.latency import BACKENDS, Latency, busy_of, labels, latencies

MIB = 1 << 20
_HEADS = {
    "time": "time", "eager_over_time": "eager / time", "over_gpu_busy": "time / GPU busy", "host": "host",
    "gpu_busy": "GPU busy", "over_full": "time / full", "over_full_paired": "time / full, paired",
    "over_roofline": "time / roofline", "over_bytes_floor": "time / bytes floor", "bytes_floor": "bytes floor",
    "equals_eager": "= eager", "equals_full": "= full", "off_full": "off full", "back_to_back": "back to back",
    "experts_reached": "experts reached", "one_ahead": "one ahead",
    "one_ahead_over_bytes_floor": "one ahead / bytes floor",
}  # fmt: skip
_MAIN = (
    "time", "eager_over_time", "over_gpu_busy", "back_to_back", "one_ahead", "host", "gpu_busy", "roofline",
    "bytes_floor", "over_bytes_floor", "one_ahead_over_bytes_floor", "over_full", "segments", "breaks",
    "experts_reached", "equals_eager", "eager_repeats", "equals_full", "off_full",
)  # fmt: skip
"""Columns of a step's table; the rest is in its details."""
_STEPS = ("prefill", "decode")
_HIDDEN = ("finite",)
_SMALL = 5.0
"""ms below which one decimal is not enough."""


@dataclass(frozen=True)
class Table:
    """Cells as text. `is_number` says which columns stand right; `details` is what a terminal leaves out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]
    caption: str = ""
    details: bool = False


def heading(result: Result) -> str:
    """What and where."""
    model = result.shape.model
    name = model if isinstance(model, str) else str(model.get("model_type", "a model of the shape below"))
    emulated = " (emulated: claims no speed)" if result.where.emulated else ""
    return f"{name}, {result.shape.dtype}, {result.where.device_name}{emulated}"


def facts(result: Result) -> list[tuple[str, str]]:
    """What a reader needs to repeat it."""
    versions = result.versions
    parts = {
        "breakgraph": versions.breakgraph, "torch": versions.torch, "transformers": versions.transformers,
        "triton": versions.triton, "CUDA": versions.cuda, "driver": result.where.driver, "Python": versions.python,
    }  # fmt: skip
    known = [
        ("command", result.run.command),
        ("commit", result.run.git_commit or "not from a checkout"),
        ("measured", result.run.started_at),
        ("versions", ", ".join(f"{name} {version}" for name, version in parts.items() if version)),
    ]
    if not isinstance(result.shape.model, str):
        known.append(("shape", ", ".join(f"{name} {value}" for name, value in result.shape.model.items())))
    if result.excluded:
        known.append(("excluded", ", ".join(result.excluded)))
    return known + [("note", note) for note in result.notes]


def tables(result: Result) -> list[Table]:
    """Latencies by tokens first, then all rows, those of one name together."""
    made = _latency_tables(result)
    for name, rows in _grouped(result.rows).items():
        if name == "step":
            made.append(_step_table(rows))
        elif name == "kernel":
            made.append(_row_table("kernels", rows, details=True))
        elif len(rows) == 1:
            made.append(_one_row(name, rows[0]))
        elif name in _STEPS:
            made += [_row_table(name, rows, only=_MAIN), _row_table(f"{name}, all figures", rows, details=True)]
        else:
            made.append(_row_table(name, rows))
    return made


def _latency_tables(result: Result) -> list[Table]:
    found = latencies(result)
    return [
        _latency_table([one for one in found if one.requests == requests], requests)
        for requests in sorted({one.requests for one in found})
    ]


def _latency_table(found: Sequence[Latency], requests: int) -> Table:
    names = labels(found)
    times = {(one.tokens, one.backend, one.fusion, one.attention): one.time for one in found}
    sizes = sorted({one.tokens for one in found})
    busy = [busy_of(found, tokens) for tokens in sizes]
    columns = {label: [times.get((tokens, *key)) for tokens in sizes] for key, label in names.items()}
    if any(value is not None for value in busy):
        columns["GPU busy"] = busy
    shown = [value for values in columns.values() for value in values if value is not None]
    decimals = 1 if min(shown) >= _SMALL else 2
    ours = list(dict.fromkeys(one.attention for one in found if one.backend in BACKENDS and one.attention))
    return Table(
        title=f"ms a step, {requests} request{'s' * (requests > 1)}",
        columns=("tokens", *columns),
        rows=tuple(
            (str(tokens), *("" if values[i] is None else f"{values[i]:.{decimals}f}" for values in columns.values()))
            for i, tokens in enumerate(sizes)
        ),
        is_number=(True,) * (1 + len(columns)),
        caption=f"attention {', '.join(ours)}" if ours else "",
    )


def _grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of one name; those whose name is theirs alone go by their parameters."""
    rows = list(rows)
    names = [row.name for row in rows]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        is_own = names.count(row.name) == 1 and sum(other.params.keys() == row.params.keys() for other in rows) > 1
        groups.setdefault(f"by {', '.join(row.params)}" if is_own and row.params else row.name, []).append(row)
    return groups


def _row_table(title: str, rows: Sequence[Row], only: Sequence[str] = (), details: bool = False) -> Table:
    params = list(dict.fromkeys(name for row in rows for name in row.params))
    same = {name: rows[0].params.get(name) for name in params if len({row.params.get(name) for row in rows}) == 1}
    params = [name for name in params if name not in same]
    metrics = [name for name in _metric_names(rows) if not only or name in only]
    metrics.sort(key=lambda name: only.index(name) if only else 0)
    cases = [tuple(row.params.get(name) for name in params) for row in rows]
    has_names = len({row.name for row in rows}) > 1 and len(set(cases)) < len(cases)
    heads = [*(["name"] if has_names else []), *params, *(_head(name, rows) for name in metrics)]
    body = []
    for row in rows:
        cells = [row.name] if has_names else []
        cells += [_scalar(row.params.get(name)) for name in params]
        body.append((*cells, *(_cell(row.metrics, name, len(_units(name, rows)) > 1) for name in metrics)))
    is_number = tuple(all(_is_number(cells[i]) for cells in body) for i in range(len(heads)))
    caption = ", ".join(f"{name} {_scalar(value)}" for name, value in same.items())
    return Table(title, tuple(heads), tuple(body), is_number, caption, details)


def _one_row(name: str, row: Row) -> Table:
    names = _metric_names([row])
    body = tuple((name, _cell(row.metrics, name), _unit(row.metrics[name])) for name in names)
    caption = ", ".join(f"{key} {_scalar(value)}" for key, value in row.params.items())
    return Table(name, ("figure", "value", "unit"), body, (False, True, False), caption)


def _step_table(rows: Sequence[Row]) -> Table:
    """Steps of one kind together."""
    groups: dict[tuple[Scalar, ...], list[Row]] = {}
    for row in rows:
        keys = ("backend", "fusion", "attention", "phase", "bucket", "kind")
        groups.setdefault(tuple(row.params.get(key) for key in keys), []).append(row)
    body = []
    for key, members in groups.items():
        hosts = [row.metrics["host"].value for row in members if "host" in row.metrics]
        nodes = sum(row.metrics["nodes"].value for row in members)
        times = (f"{statistics.median(hosts):.1f}", f"{sum(hosts):.0f}") if hosts else ("", "")
        body.append((*map(_scalar, key), str(len(members)), str(nodes), *times))
    heads = ("backend", "fusion", "attention", "phase", "bucket", "kind", "steps", "nodes", "host each, us",
             "host in all, us")  # fmt: skip
    return Table("steps of a replay", heads, tuple(body), (False,) * 4 + (True, False) + (True,) * 4)


def _metric_names(rows: Iterable[Row]) -> list[str]:
    """In order, without what is shown as the spread of another."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    spreads = {spread for name in names for spread in _spread_names(name)}
    return [name for name in names if name not in spreads and name not in _HIDDEN]


def _spread_names(name: str) -> tuple[str, str]:
    return ("p10", "p90") if name == "time" else (f"{name}_p10", f"{name}_p90")


def _head(name: str, rows: Sequence[Row]) -> str:
    units = _units(name, rows)
    unit = units.pop() if len(units) == 1 else ""
    spread = " [p10, p90]" if any(_spread_names(name)[0] in row.metrics for row in rows) else ""
    return _HEADS.get(name, name.replace("_", " ")) + (f", {unit}" if unit else "") + spread


def _units(name: str, rows: Iterable[Row]) -> set[str]:
    return {_unit(row.metrics[name]) for row in rows if name in row.metrics}


def _unit(metric: Metric) -> str:
    return {"bytes": "MiB", "count": "", "bool": "", "ratio": ""}.get(metric.unit, metric.unit)


def _cell(metrics: Mapping[str, Metric], name: str, with_unit: bool = False) -> str:
    if name not in metrics:
        return ""
    text = number(metrics[name])
    spread = [number(metrics[other]) for other in _spread_names(name) if other in metrics]
    shown = f"{text} [{', '.join(spread)}]" if spread else text
    return f"{shown} {_unit(metrics[name])}" if with_unit else shown


def number(metric: Metric) -> str:
    """For people: four significant digits at least, bytes as MiB."""
    if isinstance(metric.value, bool):
        return "yes" if metric.value else "NO"
    if metric.unit == "count":
        return str(metric.value)
    value = metric.value / MIB if metric.unit == "bytes" else metric.value
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _scalar(value: Scalar) -> str:
    return "" if value is None else str(value)


def _is_number(cell: str) -> bool:
    return not cell or cell.lstrip("-").replace(".", "", 1).split(" ")[0].isdigit() or "e-" in cell

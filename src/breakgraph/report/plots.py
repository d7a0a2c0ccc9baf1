"""Plots of a result as SVG text, drawn with matplotlib: latency by tokens, memory by bucket, steps in time."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from breakgraph.bench.result import Result, Row
from breakgraph.errors import ConfigError
from breakgraph.report.latency import busy_of, labels, latencies
from breakgraph.report.tables import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"eager": "#8a6d3b", "breakable": "#1f6fb4", "full": "#d8662a"}
_OTHERS = ("#3a8f5c", "#8054a8", "#b23a6b", "#4c8c99", "#7a7a2e")
_TEXT, _FAINT = "#1c2230", "#8a91a3"
_MARKERS = "osD^vP*X"
_WIDTH = 9.6
_ARM = ("backend", "fusion", "attention")


@dataclass(frozen=True)
class Plot:
    """An `<svg>` element, and what it shows."""

    svg: str
    caption: str


def plots(result: Result) -> list[Plot]:
    """Those that the rows give.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return [Plot(_svg(figure), caption) for figure, caption in figures(result)]


def figures(result: Result) -> list[tuple[Figure, str]]:
    """With their captions."""
    return [*_latency_figures(result), *_memory_figures(result), *_timeline_figures(result)]


def _figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"format 'html' draws its plots with matplotlib, which does not import ({error}); install it with "
            "pip install 'breakgraph[report]', or use format 'markdown'"
        ) from error
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _svg(figure: Figure) -> str:
    """The element alone, the same bytes for the same figure; its text stays text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "breakgraph", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL).strip()


def _latency_figures(result: Result) -> list[tuple[Figure, str]]:
    found = latencies(result)
    if not found:
        return []
    requests = min(one.requests for one in found)
    found = [one for one in found if one.requests == requests]
    sizes = sorted({one.tokens for one in found})
    figure = _figure(5.0)
    axes: Any = figure.subplots()
    colors = iter(_OTHERS * 9)
    for index, (key, label) in enumerate(labels(found).items()):
        line = sorted((one for one in found if (one.backend, one.fusion, one.attention) == key), key=lambda o: o.tokens)
        own = _COLORS.get(label) or next(colors)
        axes.plot(
            [one.tokens for one in line], [one.time for one in line], label=label, color=own, linewidth=1.8,
            marker=_MARKERS[index % len(_MARKERS)], markersize=5,
        )  # fmt: skip
        spread = [(one.tokens, one.p10, one.p90) for one in line if one.p10 is not None and one.p90 is not None]
        if spread:
            axes.fill_between(*zip(*spread, strict=True), color=own, alpha=0.18, linewidth=0)
    for name, style, values in (
        ("GPU busy: the kernels alone", "--", [busy_of(found, tokens) for tokens in sizes]),
        ("roofline of the shape", ":", [_roofline(found, tokens) for tokens in sizes]),
    ):
        if all(value is not None for value in values):
            axes.plot(sizes, values, style, label=name, color=_TEXT, linewidth=1.2)
    _log_axes(axes, sizes, [one.time for one in found])
    axes.set_xlabel("tokens of the step")
    axes.set_ylabel("ms (lower is better)")
    axes.legend(frameon=False, loc="upper left")
    plural = "s" * (requests > 1)
    caption = (
        f"Latency of one prefill step of {requests} request{plural} against its tokens, median of all rounds; the band "
        "is the 10th to the 90th percentile. Where a line meets the dashed one, launching costs nothing."
    )
    return [(figure, caption)]


def _roofline(found: Sequence[Any], tokens: int) -> float | None:
    return next((one.roofline for one in found if one.tokens == tokens and one.roofline is not None), None)


def _log_axes(axes: Any, sizes: Sequence[int], times: Sequence[float]) -> None:
    """Both axes grow by factors, with plain numbers at them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(top=max(times) * 1.6)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(True, axis="y", color="#e6e9ef")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _arms(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """By backend, fusion, attention and phase."""
    arms: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        arms.setdefault(tuple(str(row.params.get(name)) for name in (*_ARM, "phase")), []).append(row)
    return arms


def _memory_figures(result: Result) -> list[tuple[Figure, str]]:
    rows = [row for row in result.rows if row.name == "bucket" and "activations" in row.metrics]
    if not rows:
        return []
    pools = {
        tuple(str(row.params.get(name)) for name in _ARM): row.metrics["pool"].value / MIB
        for row in result.rows
        if row.name == "capture" and "pool" in row.metrics
    }
    arms = _arms(rows)
    figure = _figure(0.4 + 2.6 * len(arms))
    for axes, (arm, members) in zip(figure.subplots(len(arms), squeeze=False)[:, 0], arms.items(), strict=True):
        members = sorted(members, key=lambda row: int(str(row.params["bucket"])))
        sizes = [row.metrics["activations"].value / MIB for row in members]
        axes.bar(range(len(sizes)), sizes, color=_COLORS.get(arm[0], _OTHERS[0]), width=0.75)
        _bucket_ticks(axes, [str(row.params["bucket"]) for row in members])
        pool = pools.get(arm[:3])
        together = f"sum of the bars {sum(sizes):,.1f} MiB"
        if pool is not None:
            axes.axhline(pool, color=_TEXT, linewidth=1.2, linestyle="--")
            axes.set_ylim(top=1.25 * max(pool, *sizes))
            axes.annotate(f"pool of all phases: {pool:,.1f} MiB", (0, pool), (4, 4), textcoords="offset points")
        axes.set_title(f"{_arm_name(arm)}: {arm[3]}, {len(sizes)} buckets, {together}", loc="left", fontsize=10)
        axes.set_ylabel("MiB")
        axes.set_xlabel("bucket, in tokens" if arm[3] == "prefill" else "bucket, in requests")
        _plain(axes)
    caption = (
        "Activations of each bucket (bars). All buckets of all phases lie in one pool (dashed), which holds about the "
        "largest of them and not their sum."
    )
    return [(figure, caption)]


def _bucket_ticks(axes: Any, names: Sequence[str]) -> None:
    """All of them where there is room."""
    every = -(-len(names) // 24)
    shown = [i for i in range(len(names)) if (len(names) - 1 - i) % every == 0]
    axes.set_xticks(shown, [names[i] for i in shown], fontsize=8.5)


def _arm_name(arm: Sequence[str]) -> str:
    return f"{arm[0]} ({arm[2]}" + (")" if arm[1] in ("none", "None") else f", {arm[1]})")


def _timeline_figures(result: Result) -> list[tuple[Figure, str]]:
    """Of arms that break: a full graph is a single bar."""
    arms = _arms([row for row in result.rows if row.name == "step"])
    broken = {arm: rows for arm, rows in arms.items() if any(row.params.get("kind") == "break" for row in rows)}
    if not broken:
        return []
    figure = _figure(0.4 + 1.7 * len(broken))
    is_timed = all("host" in row.metrics for rows in broken.values() for row in rows if row.metrics["nodes"].value)
    for axes, (arm, rows) in zip(figure.subplots(len(broken), squeeze=False)[:, 0], broken.items(), strict=True):
        _timeline(axes, arm, rows, is_timed)
    what = "One replay: host time of each step, as the median of three" if is_timed else (
        "One replay: steps in their order; no times, as the device is emulated")  # fmt: skip
    caption = (
        f"{what}. A segment is one graph launch, a break runs as Python; the GPU works on one while the host is "
        "already at the next."
    )
    return [(figure, caption)]


def _timeline(axes: Any, arm: Sequence[str], rows: Sequence[Row], is_timed: bool) -> None:
    rows = sorted(rows, key=lambda row: int(str(row.params["index"])))
    kinds: dict[str, list[tuple[float, float]]] = {"segment": [], "break": []}
    now = 0.0
    for row in rows:
        width = float(row.metrics["host"].value) if is_timed and "host" in row.metrics else 0.0 if is_timed else 1.0
        kinds[str(row.params["kind"])].append((now, width))
        now += width
    names = sorted({str(row.params["step"]) for row in rows if row.params["kind"] == "break"})
    lanes = {"segment": ("segments", _COLORS["breakable"]), "break": (f"breaks: {', '.join(names)}", _COLORS["full"])}
    for lane, (kind, (_, color)) in enumerate(lanes.items()):
        axes.broken_barh(kinds[kind], (-lane - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.6)
    axes.set_yticks([0, -1], [name for name, _ in lanes.values()])
    axes.set_xlim(0, now or 1.0)
    axes.set_xlabel("host, us" if is_timed else "step")
    counts = f"{len(kinds['segment'])} segments, {len(kinds['break'])} breaks"
    total = f", host {now:,.0f} us" if is_timed else ""
    bucket = f"{arm[3]} {rows[0].params['bucket']}"
    axes.set_title(f"{_arm_name(arm)}: {bucket}, {counts}{total}", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)

"""What is captured and what ran how: as data, and as a page for a person."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from breakgraph.engine.engine import Engine
from breakgraph.runners import Runner

MIB = 1 << 20


def graphs_state(engine: Engine) -> dict[str, Any]:
    """JSON-able. `hit_rate` is the share of a phase's steps that were replays, None before the first step."""
    stats = engine.stats()
    return {
        **{name: stats[name] for name in _COMMON},
        "phases": [
            {"phase": phase, "attention": stats["attention"][phase], **_phase_state(runner)}
            for phase, runner in engine.runners.items()
        ],
        "requests": {name: stats[name] for name in ("num_running", "num_waiting", "num_preemptions")},
        "prefix_cache": {name: stats[name] for name in ("num_prompt_tokens", "num_prefix_cached_tokens")},
        "memory": {
            "pool_bytes": stats["pool_bytes"],
            "output_bytes": stats["output_bytes"],
            "kv_cache_bytes": stats["kv_cache_bytes"],
            "weight_bytes": engine.facts.weight_bytes,
            **{name: stats[name] for name in ("num_kv_blocks", "num_free_kv_blocks", "num_cached_kv_blocks")},
        },
    }


_COMMON = ("model", "device", "emulated", "dtype", "max_model_len")


def of_replicas(states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What is the same of several engines, and `replicas`: the rest of each, with its name as `replica`."""
    first = next(iter(states.values()))
    return {
        **{name: first[name] for name in _COMMON},
        "replicas": [
            {"replica": replica, **{name: value for name, value in state.items() if name not in _COMMON}}
            for replica, state in states.items()
        ],
    }


def _phase_state(runner: Runner) -> dict[str, Any]:
    replays, eager_steps = runner.stats.replays, runner.stats.eager_steps
    num_replays, num_eager = sum(replays.values()), sum(eager_steps.values())
    buckets = [
        {
            "bucket": key.size,
            "num_segments": report.num_segments,
            "num_breaks": report.num_breaks,
            "num_nodes": sum(step.num_nodes for step in report.steps),
            "num_replays": replays.get(key.size, 0),
            "capture_sec": report.capture_sec,
            "pool_growth_bytes": report.pool_growth_bytes,
        }
        for key, report in sorted(runner.explain().items(), key=lambda item: item[0].size)
    ]
    return {
        "backend": runner.backend.name,
        "num_replays": num_replays,
        "num_eager_steps": num_eager,
        "hit_rate": num_replays / (num_replays + num_eager) if num_replays + num_eager else None,
        "num_eager_steps_by_reason": {reason.value: count for reason, count in eager_steps.items()},
        "num_padded_tokens": runner.stats.num_padded_tokens,
        "buckets": buckets,
    }


_UNITS = {"prefill": "tokens", "decode": "requests"}

_REASONS = {
    "backend_eager": "this phase does not capture",
    "too_many_tokens": "the step was larger than the largest bucket",
    "too_many_requests": "the step had more requests than the largest bucket",
    "not_captured": "its bucket was not captured",
}

_LEGEND = (
    "A step that fits a bucket is padded to it and replayed: its graphs run, with eager breaks between them. "
    "Every other step runs eagerly."
)
_ABOUT_REPLICAS = "Each is an engine of its own. One that is replaced gets a new name and counts from zero."

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
body.wide { max-width: 84rem; } a { color: #2a5d9c; } section { border-top: 3px solid #4a7ebb; margin-top: 2.5rem; }
.wide main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(36rem, 100%), 1fr)); gap: 0 3rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .2rem; } section h2 { margin-top: .8rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .2rem; } p.about { color: #666; margin: .2rem 0 .8rem; }
table { border-collapse: collapse; margin-bottom: .8rem; }
th { font-weight: 600; text-align: right; color: #555; vertical-align: bottom; }
th, td { padding: .15rem .9rem .15rem 0; } td { text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } tr + tr td { border-top: 1px solid #eee; }
.bar { display: inline-block; height: .7rem; background: #4a7ebb; vertical-align: middle; float: left; }
.good { color: #1a7f37; } .bad { color: #b35900; }
"""


def graphs_page(state: dict[str, Any]) -> str:
    """One HTML page without anything from elsewhere; it loads itself anew every ten seconds. Of one engine's state, or
    that of several (`of_replicas`): then all of them at a glance come first."""
    emulated = " (emulated: works, and claims no speed)" if state["emulated"] else ""
    replicas = state.get("replicas")
    parts = [
        f"<h1>{escape(state['model'])}</h1>",
        f"<p class=about>{escape(state['dtype'])} on {escape(state['device'])}{emulated}, "
        f"up to {state['max_model_len']} tokens a request</p><p class=about>{_LEGEND}</p>",
    ]
    if replicas is None:
        parts += ["<main>", *_engine_sections(state, "h2"), "</main>"]
    else:
        parts += [_overview(replicas), "<main>", *map(_replica_section, replicas), "</main>"]
    head = f"<meta charset=utf-8><meta http-equiv=refresh content=10><title>Graphs</title><style>{_STYLE}</style>"
    body = "<body>" if replicas is None else "<body class=wide>"
    return f"<!doctype html><html lang=en><head>{head}</head>{body}{''.join(parts)}</body></html>"


def _overview(replicas: list[dict[str, Any]]) -> str:
    rows = []
    for state in replicas:
        name, requests = escape(state["replica"]), state["requests"]
        row = (f"<a href='#{name}'>{name}</a>", str(requests["num_running"]), str(requests["num_waiting"]))
        rows.append((*row, _blocks_in_use(state), *map(_hit, state["phases"])))
    phases = (f"{phase['phase']} as graphs" for phase in replicas[0]["phases"])
    header = ("replica", "answers running", "waiting", "KV blocks in use", *phases)
    table = _table(header, rows, raw={0, *range(4, len(header))})
    return f"<h2>Replicas</h2><p class=about>{_ABOUT_REPLICAS}</p>{table}"


def _replica_section(state: dict[str, Any]) -> str:
    name = escape(state["replica"])
    return f"<section id='{name}'><h2>Replica {name}</h2>{''.join(_engine_sections(state, 'h3'))}</section>"


def _engine_sections(state: dict[str, Any], heading: str) -> list[str]:
    requests, memory, prefix = state["requests"], state["memory"], state["prefix_cache"]
    now = [
        ("answers running", str(requests["num_running"])),
        ("answers waiting", str(requests["num_waiting"])),
        ("KV blocks in use", _blocks_in_use(state)),
        (
            "prompt tokens found in the prefix cache",
            _share(prefix["num_prefix_cached_tokens"], prefix["num_prompt_tokens"]),
        ),
        ("preemptions", str(requests["num_preemptions"])),
    ]
    sizes = [
        ("weights", memory["weight_bytes"]),
        ("KV cache", memory["kv_cache_bytes"]),
        ("graph pool, shared by all buckets", memory["pool_bytes"]),
        ("graph outputs, shared by all buckets", memory["output_bytes"]),
    ]
    return [
        f"<{heading}>Now</{heading}>",
        _table((), now),
        *(_phase_section(phase, heading) for phase in state["phases"]),
        f"<{heading}>Memory</{heading}>",
        _table(("", "MiB"), [(name, _mib(size)) for name, size in sizes]),
    ]


def _blocks_in_use(state: dict[str, Any]) -> str:
    num_usable = state["memory"]["num_kv_blocks"] - 1
    return f"{num_usable - state['memory']['num_free_kv_blocks']} of {num_usable}"


def _hit(phase: dict[str, Any]) -> str:
    """The share of replays, as HTML."""
    if phase["hit_rate"] is None:
        return "no step yet"
    num_steps = phase["num_replays"] + phase["num_eager_steps"]
    tone = "good" if phase["hit_rate"] > 0.99 else "bad"
    return f"<b class={tone}>{_share(phase['num_replays'], num_steps)}</b> of {num_steps} steps"


def _phase_section(phase: dict[str, Any], heading: str) -> str:
    unit = _UNITS.get(phase["phase"], "size")
    parts = [
        f"<{heading}>{escape(phase['phase'].capitalize())}</{heading}>",
        f"<p class=about>backend {escape(phase['backend'])}, attention {escape(phase['attention'])}; ran as graphs: "
        f"{_hit(phase)}; tokens computed for padding: {phase['num_padded_tokens']}</p>",
    ]
    reasons = phase["num_eager_steps_by_reason"].items()
    if reasons:
        rows = [(f"{reason}: {_REASONS.get(reason, reason)}", str(count)) for reason, count in reasons]
        parts.append(_table(("eager steps, and why", "steps"), rows))
    if phase["buckets"]:
        most = max(1, *(bucket["num_replays"] for bucket in phase["buckets"]))
        header = (f"bucket ({unit})", "replays", "", "graphs", "eager breaks", "nodes", "capture,\u00a0s")
        parts.append(_table(header, [_bucket_row(bucket, most) for bucket in phase["buckets"]], raw={2}))
    else:
        parts.append("<p>Nothing is captured.</p>")
    return "".join(parts)


def _bucket_row(bucket: dict[str, Any], most: int) -> tuple[str, ...]:
    bar = f"<span class=bar style='width:{100 * bucket['num_replays'] / most:.0f}px'></span>"
    counts = (bucket["num_segments"], bucket["num_breaks"], bucket["num_nodes"])
    return (str(bucket["bucket"]), str(bucket["num_replays"]), bar, *map(str, counts), f"{bucket['capture_sec']:.3f}")


def _table(header: tuple[str, ...], rows: list[Any], raw: Collection[int] = ()) -> str:
    """Cells are escaped, but those of the columns `raw`."""
    top = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if i in raw else escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if header else ''}{body}</table>"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none yet"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"

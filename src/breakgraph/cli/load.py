"""`breakgraph load`: sends load to a running server and prints what its clients saw."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from importlib.util import find_spec
from typing import Any

from breakgraph.cli import engine_options as options
from breakgraph.cli.serve import KEY_VARIABLE
from breakgraph.errors import ConfigError

EXIT_FAILED = 1


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    from breakgraph.server.load import Load

    parser = subparsers.add_parser(
        "load",
        help="send load to a running server",
        description="Send load to a running server and print latencies, throughput and how many steps ran as graphs. "
        "Exit code 0: every request was answered, 1: some were not.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Load):
        options.add_flag(parser, field, field.default)
    parser.add_argument("--api-key", help=f"what the server wants as bearer token (or set {KEY_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the load and its summary")


def run(args: argparse.Namespace) -> int:
    """Prints the summary."""
    import asyncio

    if find_spec("httpx") is None:
        raise ConfigError("load needs httpx; run: pip install 'breakgraph[server]'")
    from breakgraph.server.drive import run_load
    from breakgraph.server.load import Load

    load = Load(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Load)})
    found = asyncio.run(run_load(load, args.api_key or os.environ.get(KEY_VARIABLE) or None))
    print(json.dumps({"load": dataclasses.asdict(load), **found}) if args.json else render(found))
    return EXIT_FAILED if found["num_failed_by_reason"] else 0


def render(found: dict[str, Any]) -> str:
    """For a person."""
    failed = ", ".join(f"{count} {reason}" for reason, count in found["num_failed_by_reason"].items()) or "none"
    lines = [
        f"{found['model']}: {found['num_answered']} requests answered in {found['took_sec']:.1f} s, failed: {failed}",
        f"{found['requests_per_sec']:.2f} requests/s, {found['generated_tokens_per_sec']:.1f} tokens/s; "
        f"{found['num_prompt_tokens']} prompt tokens, {found['num_generated_tokens']} generated",
    ]
    names = (("ttft_ms", "time to first token"), ("tpot_ms", "time per further token"), ("itl_ms", "between two texts"))
    for key, name in names:
        if (values := found[key]) is not None:
            lines.append(f"{name + ', ms':<28}p50 {values['p50']:9.2f}   p99 {values['p99']:9.2f}")
    for phase, use in found["graphs"].items():
        rate = "no steps" if use["hit_rate"] is None else f"{100 * use['hit_rate']:.1f} % of steps ran as graphs"
        lines.append(f"{phase}: {rate} ({use['num_replays']} replays, {use['num_eager_steps']} eager)")
    return "\n".join(lines)

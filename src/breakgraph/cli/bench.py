"""`breakgraph bench`: measures prefill, decode, serving or capture, beside what the machine can do at most."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from breakgraph.cli import bench_http, bench_serve
from breakgraph.cli import engine_options as options

if TYPE_CHECKING:
    from breakgraph.bench.config import BenchConfig
    from breakgraph.bench.result import Result

EXIT_DIFFERENT = 1
SAME_KERNELS = ("triton",)
"""Attentions that compute in breaks and in full graphs alike; others round differently there."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand and one of its own for each kind."""
    from breakgraph.bench.config import KINDS

    parser = subparsers.add_parser(
        "bench",
        help="measure prefill, decode, serve or capture",
        description="Measure a model of random weights over backends, fusions and attentions. Ceilings come first, one "
        "JSON line comes last. Exit code 0; 1: what should be equal to the bit is not; 2: refused. `serve --url` "
        "measures a running server instead.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="kind", required=True)
    for name, config_class in KINDS.items():
        if name == "serve":
            bench_serve.add_parser(kinds)
            continue
        about = str(config_class.__doc__).split("\n")[0]
        kind = kinds.add_parser(name, help=about, description=about, allow_abbrev=False)
        for field in dataclasses.fields(config_class):
            options.add_flag(kind, field, field.default)
        kind.add_argument("--out", metavar="FILE", help="also write the result file, for `breakgraph report`")


def run(args: argparse.Namespace) -> int:
    """Progress as it comes, then the tables, then the result as one line of JSON; or load over HTTP."""
    from breakgraph.bench.config import KINDS

    if args.kind == "serve" and bench_serve.is_over_http(args):
        return bench_http.run(args)
    given, config_class = vars(args), KINDS[args.kind]
    config = config_class(**{f.name: given[f.name] for f in dataclasses.fields(config_class) if f.name in given})
    from breakgraph.bench.result import check_writable, to_json, write_result
    from breakgraph.bench.run import BenchInterrupted, run_bench
    from breakgraph.report import render

    if args.out:
        check_writable(args.out)
    stopped = None
    try:
        result = run_bench(config, command_of(config), tell=_tell)
    except BenchInterrupted as interrupted:
        result, stopped = interrupted.result, interrupted
    if args.out:
        write_result(args.out, result)
    print(f"\n{render([result], 'terminal')}")
    different = unequal(result)
    for line in different:
        print(line)
    print(json.dumps(json.loads(to_json(result)), ensure_ascii=False), flush=True)
    if stopped is not None:
        raise stopped
    return EXIT_DIFFERENT if different else 0


def command_of(config: BenchConfig) -> str:
    """The command line that asks for the same: what differs from the defaults."""
    words = ["breakgraph", "bench", config.kind]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is True and not field.default:
            words.append(f"--{field.name.replace('_', '-')}")
        elif options.as_text(value) != options.as_text(field.default):
            words += [f"--{field.name.replace('_', '-')}", options.as_text(value)]
    return " ".join(words)


def unequal(result: Result) -> list[str]:
    """Cases of one result that should have given the same bits, and did not: a replay and the same step in Python; a
    break and a full graph whose attention has the same kernels."""
    found = []
    for row in result.rows:
        case = ", ".join(f"{name} {value}" for name, value in row.params.items())
        for name in ("equals_eager", "equals_full"):
            binds = name == "equals_eager" or row.params.get("attention") in SAME_KERNELS
            binds = binds and "eager_repeats" not in row.metrics
            if binds and name in row.metrics and not row.metrics[name].value:
                found.append(f"{name} is false: {case}")
    return found


def _tell(line: str) -> None:
    print(line, flush=True)

"""`breakgraph bench serve --url`: sends load to a running server and prints what its clients saw."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from breakgraph.cli.serve import KEY_VARIABLE
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.bench.result import Result

EXIT_FAILED = 1


def run(args: argparse.Namespace) -> int:
    """Prints the summary. `args` has what was given, and Load's defaults stand for the rest."""
    import asyncio

    if find_spec("httpx") is None:
        raise ConfigError("bench serve --url needs httpx; run: pip install 'breakgraph[server]'")
    from breakgraph.server.drive import run_load
    from breakgraph.server.load import Load

    given = vars(args)
    load = Load(**{field.name: given[field.name] for field in dataclasses.fields(Load) if field.name in given})
    key = given.get("api_key") or os.environ.get(KEY_VARIABLE) or None
    if args.out is None:
        found = asyncio.run(run_load(load, key))
    else:
        from breakgraph.bench.result import check_writable

        check_is_here(load.url)
        check_writable(args.out)
        found = asyncio.run(run_load(load, key, check_device_is_here))
    print(json.dumps({"load": dataclasses.asdict(load), **found}) if "json" in given else render(found))
    if args.out is not None:
        from breakgraph.bench.result import write_result

        write_result(args.out, as_result(load, found))
    return EXIT_FAILED if found["num_failed_by_reason"] else 0


def check_is_here(url: str) -> None:
    """Raises ConfigError for a server on another machine: a result file has the facts of this one."""
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"--out records this machine's device, and {url} is not on it; run this on the server's machine with "
            "--url http://127.0.0.1:PORT, or use --json"
        )


def check_device_is_here(device: str) -> None:
    """Raises ConfigError when this process cannot see the server's device, whose name a result file has."""
    import torch

    asked = torch.device(device)
    if asked.type != "cpu" and (asked.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--out records the device, and the server's {device} cannot be seen from here; run this where the server "
            "runs, with its torch and its CUDA_VISIBLE_DEVICES, or use --json"
        )


def as_result(load: Any, found: dict[str, Any]) -> Result:
    """For a result file. The client is taken to run where the server does."""
    from breakgraph.bench.result import Metric, Result, Row, Shape, here

    def metric(value: float, unit: str) -> Metric:
        return Metric(value=value, unit=unit)

    asked = {name: value for name, value in dataclasses.asdict(load).items() if name not in ("url", "seed")}
    counts = ("num_answered", "num_prompt_tokens", "num_generated_tokens")
    metrics = {name.removeprefix("num_"): metric(found[name], "count") for name in counts}
    metrics["failed"] = metric(sum(found["num_failed_by_reason"].values()), "count")
    metrics["time"] = metric(found["took_sec"], "s")
    metrics["answer_rate"] = metric(found["generated_tokens_per_sec"], "tokens/s")
    for name in ("ttft", "tpot", "itl"):
        if (values := found[f"{name}_ms"]) is not None:
            metrics |= {f"{name}_{share}": metric(value, "ms") for share, value in values.items()}
    for phase, use in found["graphs"].items():
        if use["hit_rate"] is not None:
            metrics[f"{phase}_graph_hit_rate"] = metric(100 * use["hit_rate"], "percent")
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in asked.items() if value is not None)
    command = f"breakgraph bench serve --url {shlex.quote(load.url)} {flags} --seed {load.seed}"
    run, where, versions = here(command, found["device"])
    return Result(
        run=run,
        where=where,
        versions=versions,
        shape=Shape(model=found["model"], dtype=found["dtype"]),
        rows=(Row(name="load over HTTP", params=asked, metrics=metrics),),
        notes=("times are those of clients on the server's machine; percentiles are by nearest rank",),
    )


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

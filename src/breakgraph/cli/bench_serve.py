"""`breakgraph bench serve`: two ways to measure with options of their own, offline and over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from breakgraph.cli import engine_options as options
from breakgraph.cli.serve import KEY_VARIABLE
from breakgraph.errors import ConfigError

_ABOUT = "All requests at once, offline and greedy; with --url, load over HTTP for a running server."
_DESCRIPTION = (
    "Without --url, the offline benchmark: a model of random weights answers all requests at once, over backends, "
    "fusions and attentions. With --url, load over HTTP: a running server is sent requests, and what its clients see "
    "is printed: latencies, throughput and how many steps ran as graphs. Exit code 0; 1: offline, what should be equal "
    "to the bit is not, and over HTTP, a request was not answered; 2: refused."
)
_USAGE = "%(prog)s [options of both] [offline options]\n       %(prog)s --url URL [options of both] [HTTP options]"
_ABOUT_OFFLINE = "of the offline benchmark; a backend is that of prompts, one that captures decodes in full graphs"
_HTTP_FLAGS = ("api_key", "json")
"""Beside those of Load."""


def add_parser(kinds: Any) -> None:
    """Adds the kind. But for `out`, the namespace has only the options that were given."""
    parser = kinds.add_parser("serve", help=_ABOUT, description=_DESCRIPTION, usage=_USAGE, allow_abbrev=False)
    both = parser.add_argument_group("options of both")
    http = parser.add_argument_group("HTTP options", "of load over HTTP, for which --url asks")
    offline = parser.add_argument_group("offline options", _ABOUT_OFFLINE)
    offline_fields, http_fields = _fields()
    for name, field in offline_fields.items():
        if name not in http_fields:
            options.add_flag(offline, field, argparse.SUPPRESS)
            continue
        other = http_fields[name]
        about = f"over HTTP, {other.metadata['help']} (default: {other.default}); offline, {field.metadata['help']}"
        options.add_flag(both, field, argparse.SUPPRESS, about)
    for name, field in http_fields.items():
        if name == "url":
            http.add_argument("--url", default=argparse.SUPPRESS, help=field.metadata["help"])
        elif name not in offline_fields:
            options.add_flag(http, field, argparse.SUPPRESS)
    about_key = f"what the server wants as bearer token (or set {KEY_VARIABLE})"
    http.add_argument("--api-key", default=argparse.SUPPRESS, help=about_key)
    about_json = "print one JSON object: the load and its summary"
    http.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=about_json)
    about_out = "also write the result file, for `breakgraph report`; over HTTP, on the server's machine only"
    both.add_argument("--out", metavar="FILE", help=about_out)


def is_over_http(args: argparse.Namespace) -> bool:
    """Whether a running server is measured, as --url says.

    Raises ConfigError for options of the other way.
    """
    offline, http = _fields()
    if hasattr(args, "url"):
        if foreign := _given(args, [name for name in offline if name not in http]):
            raise ConfigError(
                f"bench serve: only the offline benchmark has {foreign}, and --url asks for load over HTTP; leave out "
                f"--url, or leave out {foreign}"
            )
        return True
    if foreign := _given(args, [name for name in (*http, *_HTTP_FLAGS) if name not in offline]):
        raise ConfigError(
            f"bench serve: only load over HTTP has {foreign}, and without --url this is the offline benchmark; add the "
            f"server's address, as in --url http://127.0.0.1:8000, or leave out {foreign}"
        )
    return False


def _fields() -> tuple[dict[str, dataclasses.Field[Any]], dict[str, dataclasses.Field[Any]]]:
    """Those of the offline benchmark and those of load over HTTP, by name."""
    from breakgraph.bench.config import ServeBench
    from breakgraph.server.load import Load

    offline, http = ({field.name: field for field in dataclasses.fields(kind)} for kind in (ServeBench, Load))
    return offline, http


def _given(args: argparse.Namespace, names: list[str]) -> str:
    """Those of the names that were given, as flags."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if hasattr(args, name))

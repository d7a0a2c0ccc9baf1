"""`breakgraph serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import dataclasses
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from breakgraph.cli import engine_options as options
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.server.config import ServerConfig

KEY_VARIABLE = "BREAKGRAPH_API_KEY"
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    from breakgraph.server.config import ServerConfig

    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP with OpenAI's API: chat and plain completions, whole or as a stream.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("server options")
    for field in dataclasses.fields(ServerConfig):
        if field.name == "api_key":
            group.add_argument("--api-key", help=f"{field.metadata['help']} (or set {KEY_VARIABLE})")
        else:
            options.add_flag(group, field, field.default)
    group.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="engines behind the port, through Ray Serve (default: 1)"
    )
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="Ray cluster for the replicas (default: one of this machine alone)"
    )
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, lets running requests end, and exits with 0."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}; run: pip install 'breakgraph[server]'")
    from breakgraph.server.config import ServerConfig

    if args.load_format == "dummy":
        # Said before the model is made.
        raise ConfigError("--load-format dummy has no tokenizer, and a server needs one")
    if args.api_key is None:
        args.api_key = os.environ.get(KEY_VARIABLE)
    config = ServerConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ServerConfig)})
    if args.replicas < 1:
        raise ConfigError(f"--replicas must be an integer >= 1, got {args.replicas}")
    if args.replicas > 1 or args.ray_address is not None:
        return _serve_replicas(args, config)
    from breakgraph.engine.llm import LLM
    from breakgraph.server.run import bind, serve

    with bind(config) as bound, LLM(**options.engine_options(args)) as llm:
        serve(llm, config, bound)
    return 0


def _serve_replicas(args: argparse.Namespace, config: ServerConfig) -> int:
    if find_spec("ray") is None:
        raise ConfigError("replicas need Ray Serve; run: pip install 'breakgraph[ray]'")
    # Before Ray is imported, which reads them: it reports its use over the network otherwise, and a cluster of this
    # machine alone would listen on every interface.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if args.ray_address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from breakgraph.server.replicas import serve_replicas
    from breakgraph.server.run import bind

    with bind(config) as bound:
        serve_replicas(options.engine_options(args), config, bound, args.replicas, args.ray_address)
    return 0

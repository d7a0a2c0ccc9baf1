"""Result files as tables and pages. Reads `breakgraph.bench.result` only, and needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from breakgraph.bench.result import Result
from breakgraph.errors import ConfigError, UnknownNameError

FORMATS = ("terminal", "markdown", "html")


def render(results: Sequence[Result], form: str) -> str:
    """One document of several results, in their order.

    Raises:
        UnknownNameError: no such format.
        ConfigError: there are no results, or (html) matplotlib is not installed.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if not results:
        raise ConfigError("expected at least one result, got none")
    renderer = cast("Callable[[Sequence[Result]], str]", import_module(f"breakgraph.report.{form}").render)
    return renderer(results)

"""Engine and sampling options of the subcommands that run a model, made from the dataclasses that define them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breakgraph.engine.sampling import SamplingParams

CACHE_VARIABLE = "BREAKGRAPH_CACHE"
DEFAULT_MODEL = "smollm2"


def int_list(text: str) -> tuple[int, ...]:
    """ "1,2,3" as integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers with commas between them, got {text!r}") from None


def name_list(text: str) -> tuple[str, ...]:
    """ "a,b" as names."""
    return tuple(part.strip() for part in text.split(","))


# By annotation, which the dataclasses keep as text.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "str | None": str,
    "int | None": int,
    "float": float,
    "Sequence[int]": int_list,
    "Sequence[int] | None": int_list,
    "Sequence[str]": name_list,
    "str | Path | None": str,
}


def add_engine_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """One flag for each field of EngineConfig but those ``without``, with its default and help."""
    from breakgraph.engine.config import EngineConfig

    group = parser.add_argument_group("engine options")
    for field in dataclasses.fields(EngineConfig):
        if field.name in without:
            continue
        if field.name == "seed":
            # One flag for both: None keeps unseeded sampling where only the engine has a default.
            add_flag(group, field, None, "for dummy weights and for sampling")
        else:
            add_flag(group, field, DEFAULT_MODEL if field.name == "model" else field.default)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One flag for each simple field of SamplingParams; the engine's --seed is also the sampling seed."""
    from breakgraph.engine.sampling import SamplingParams

    group = parser.add_argument_group("sampling options")
    for field in dataclasses.fields(SamplingParams):
        if field.name == "stop":
            group.add_argument("--stop", action="append", help=f"{field.metadata['help']}; may be given several times")
        elif field.name == "ignore_eos":
            group.add_argument("--ignore-eos", action="store_true", help=field.metadata["help"])
        elif field.name not in ("guided_decoding", "seed"):
            add_flag(group, field, field.default)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM, `model` included."""
    from breakgraph.engine.config import EngineConfig

    names = [field.name for field in dataclasses.fields(EngineConfig)]
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    options["seed"] = EngineConfig.seed if args.seed is None else args.seed
    options["cache_dir"] = args.cache_dir or os.environ.get(CACHE_VARIABLE) or None
    return options


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises ConfigError for a value out of range."""
    from breakgraph.engine.sampling import SamplingParams

    names = [field.name for field in dataclasses.fields(SamplingParams) if hasattr(args, field.name)]
    return SamplingParams(**{name: getattr(args, name) for name in names})


def add_flag(group: Any, field: dataclasses.Field[Any], default: Any, about: str = "") -> None:
    """The flag of one dataclass field, with its help, or another one, and a default.

    With argparse.SUPPRESS the namespace has the option only if it was given, and the help says the field's default.
    """
    flag = "--" + field.name.replace("_", "-")
    about = about or field.metadata["help"]
    value = field.default if default is argparse.SUPPRESS else default
    shown = "" if value is None else f" (default: {as_text(value)})"
    if field.type == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=about + shown)
    else:
        group.add_argument(flag, type=_PARSERS[str(field.type)], default=default, help=about + shown)


def as_text(value: Any) -> str:
    """As it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

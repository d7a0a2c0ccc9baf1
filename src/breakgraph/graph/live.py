"""Values that change from step to step, passed to a break by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from breakgraph.errors import ConfigError

T = TypeVar("T")


class Live(Generic[T]):
    """A named value that is looked up at each run: pass it to a break in the place of the value.

    Set it before each replay, and the break gets what was set, also an object that could not be passed itself. Only as
    an argument of its own, not inside a list or another container.

    Args:
        name: Shown in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._values: list[T] = []

    def set(self, value: T) -> None:
        """From here runs of breaks get ``value``."""
        self._values = [value]

    @property
    def value(self) -> T:
        """What was set last.

        Raises:
            ConfigError: nothing was.
        """
        if not self._values:
            raise ConfigError(f"the live value {self.name!r} was never set; call its set() before the capture")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Live({self.name!r})"


def has_live(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument is a live name."""
    return any(type(value) is Live for value in args) or any(type(value) is Live for value in kwargs.values())


def resolved(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with the values of now in the place of live names."""
    return (
        [value.value if type(value) is Live else value for value in args],
        {name: value.value if type(value) is Live else value for name, value in kwargs.items()},
    )

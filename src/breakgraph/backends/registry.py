"""Backend names. A backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from breakgraph.errors import UnknownNameError

if TYPE_CHECKING:
    from breakgraph.backends.base import Backend
    from breakgraph.graph import PlanFamily

_WHERE = {
    "auto": ("breakgraph.backends.auto", "AutoBackend"),
    "breakable": ("breakgraph.backends.breakable", "BreakableBackend"),
    "debug_eager": ("breakgraph.backends.breakable", "DebugEagerBackend"),
    "eager": ("breakgraph.backends.eager", "EagerBackend"),
    "full": ("breakgraph.backends.full", "FullBackend"),
    "tc_piecewise": ("breakgraph.backends.tc_piecewise", "TcPiecewiseBackend"),
    "tc_piecewise_inductor": ("breakgraph.backends.tc_piecewise", "TcPiecewiseInductorBackend"),
}

BACKENDS: tuple[str, ...] = tuple(_WHERE)


def backend_class(name: str) -> type[Backend]:
    """The class behind a name, for what it declares (``captures``, ``records_breaks``).

    Raises:
        UnknownNameError: no such backend; the message lists the known ones.
    """
    if name not in _WHERE:
        raise UnknownNameError("backend", name, BACKENDS)
    module, attribute = _WHERE[name]
    return cast("type[Backend]", getattr(importlib.import_module(module), attribute))


def make_backend(name: str, family: PlanFamily) -> Backend:
    """A backend that captures into ``family``.

    Raises:
        UnknownNameError: no such backend; the message lists the known ones.
    """
    return backend_class(name)(family)

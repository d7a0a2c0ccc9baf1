"""What no segment can hold, found before the device would: host reads, data-dependent shapes, pageable copies.

Two places are watched. The dispatcher shows every operator; a function mode shows the few calls that never reach it
(``tolist``, ``numpy``, ``torch.tensor(data, device=...)``). Refusing here, rather than letting CUDA fail, keeps the
process able to capture and names the line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from breakgraph.errors import UncapturableOpError
from breakgraph.graph.effects import tensors_in

_OWN_FOLDER = str(Path(__file__).parent)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
WAY_OUT = "move it into an eager break (@eager_on_graph or mark_eager), or out of the captured function"


def source_line(*skipped: str) -> str:
    """``file:line in function`` of the innermost frame outside torch, this folder and those ``skipped``."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_OWN_FOLDER, _TORCH_FOLDER, "<", *skipped)):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "unknown source line"


def refuse(what: str, why: str) -> None:
    """Raise for one operation.

    Raises:
        UncapturableOpError: always.
    """
    raise UncapturableOpError(f"{what} cannot be captured: it {why} ({source_line()}); {WAY_OUT}")


def _has_bool_index(args: Sequence[Any]) -> bool:
    indices = args[1] if len(args) > 1 else None
    return isinstance(indices, list | tuple) and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_MOVES_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_"}


def check_op(func: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Raises UncapturableOpError for an operator that would sync, or whose result shape depends on data."""
    name = func._schema.name
    if name in _INDEXING:
        if _has_bool_index(args):
            refuse(f"{func} with a boolean mask", "has a result whose shape depends on data")
        return
    if torch.Tag.data_dependent_output in func.tags:
        refuse(str(func), "reads a device value on the host, which waits for the device")
    if torch.Tag.dynamic_output_shape in func.tags:
        refuse(str(func), "has a result whose shape depends on data")
    if name in _MOVES_STORAGE:
        refuse(str(func), "moves a tensor to other memory, and the graph holds the old address")


class HostReadGuard(TorchFunctionMode):
    """Refuses the calls that read a device tensor on the host, or upload host data, without the dispatcher seeing it.

    Args:
        is_device: Tells device tensors from host tensors.
        tag_host: Called with each tensor that is made on the host; None where the device shows in the tensor itself.

    Attributes:
        enabled: Set while a segment is open; otherwise everything passes.
    """

    _READS = frozenset({"tolist", "numpy", "__array__", "cpu", "__dlpack__", "__repr__", "__format__"})
    _UPLOADS = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "from_numpy"})

    def __init__(
        self, is_device: Callable[[torch.Tensor], bool], tag_host: Callable[[torch.Tensor], None] | None
    ) -> None:
        super().__init__()
        self._is_device = is_device
        self._tag_host = tag_host
        self.enabled = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in self._READS and args and isinstance(args[0], torch.Tensor) and self._is_device(args[0]):
            refuse(f"Tensor.{name}()", "copies a device tensor to the host and waits for it")
        if name in self._UPLOADS and not (args and isinstance(args[0], torch.Tensor)):
            if any(self._is_device(t) for t in tensors_in(args)):
                refuse(f"torch.{name}() of device tensors", "reads their values on the host and waits for the device")
            target = kwargs.get("device")
            on_device = target is not None and (self._tag_host is not None or torch.device(target).type != "cpu")
            if on_device:
                refuse(f"torch.{name}(data, device=...)", "uploads host data from pageable memory")
            made = func(*args, **kwargs)
            if self._tag_host is not None and isinstance(made, torch.Tensor):
                self._tag_host(made)
            return made
        return func(*args, **kwargs)

"""What no segment can hold, found before the device would: host reads, data-dependent shapes, pageable copies.

Two places are watched. The dispatcher shows every operator; a function mode shows the few calls that never reach it
(``tolist``, ``numpy``, ``torch.tensor(data, device=...)``). Refusing here, rather than letting CUDA fail, keeps the
process able to capture and names the line.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from breakgraph.errors import UncapturableOpError
from breakgraph.graph.effects import tensors_in
from breakgraph.graph.pretence import OnlyLooks
from breakgraph.graph.tree import is_scattered, layout_of

_OWN_FOLDER = str(Path(__file__).parent)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
WAY_OUT = "move it into an eager break (@eager_on_graph or mark_eager), or out of the captured function"


def is_user_file(filename: str) -> bool:
    """Whether a source file is neither torch's nor of this package."""
    return not filename.startswith((_OWN_FOLDER, _TORCH_FOLDER, "<"))


class _TracedCode(threading.local):
    stack: str | None = None


traced_code = _TracedCode()
"""Of the traced operator that this thread runs: the stack that it had when it was traced, as text."""


def source_line(*skipped: str) -> str:
    """``file:line in function`` of the innermost frame outside torch, this folder and those ``skipped``."""
    if traced_code.stack is not None:
        return innermost_line(re.findall(r'File "(.+?)", line (\d+), in (\S+)', traced_code.stack), *skipped)
    return innermost_line([(f.filename, f.lineno, f.name) for f in traceback.extract_stack()], *skipped)


def innermost_line(frames: Sequence[tuple[str, object, str]], *skipped: str) -> str:
    """The same for frames as file, line and function, outermost first."""
    for filename, line, name in reversed(frames):
        if is_user_file(filename) and not (skipped and filename.startswith(skipped)):
            return f"{filename}:{line} in {name}"
    return "unknown source line"


class Fault(NamedTuple):
    """Something that no segment can hold: of which kind, what it is, and why not."""

    kind: str
    what: str
    why: str


HOST_SYNC, SHAPE, COPY, MOVE = "host sync", "data-dependent shape", "pageable copy", "moved storage"
FUNCTIONS, LAYOUT = "higher-order operator", "tensor layout"
Operator = torch._ops.OpOverload | torch._ops.HigherOrderOperator


def refuse(fault: Fault, cause: BaseException | None = None, way_out: str = WAY_OUT) -> NoReturn:
    """Raise for one operation.

    Raises:
        UncapturableOpError: always.
    """
    said = f"{fault.what} cannot be captured: it {fault.why} ({source_line()}); {way_out}"
    raise UncapturableOpError(said) from cause


def _has_bool_index(args: Sequence[Any]) -> bool:
    indices = args[1] if len(args) > 1 else None
    return isinstance(indices, list | tuple) and any(map(_is_mask, indices))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fills_by_mask(name: str, args: Sequence[Any]) -> bool:
    """``x[mask] = 0.0``: with one mask and a number from the host, torch fills without looking for places."""
    if name not in _PUTS or len(args) < 3 or (len(args) > 3 and args[3]):
        return False
    value, indices = args[2], [index for index in args[1] if index is not None]
    is_number = value.numel() == 1 and value.device.type == "cpu" and (args[0].device.type != "cpu" or value.dim() == 0)
    return is_number and len(indices) == 1 and _is_mask(indices[0])


_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_PUTS = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MOVES_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_"}
_TRANSFERS = {"aten::copy_", "aten::_to_copy"}
_NESTS = {"aten::_nested_tensor_from_mask", "aten::_nested_tensor_from_mask_left_aligned"}
"""Read the mask, and no tag says so."""
_CHECKS = {"aten::_linalg_check_errors"}


def applies_functions(func: Operator) -> bool:
    """Whether it is one like `torch.cond`. Modes that say `supports_higher_order_operators` see those whole."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def is_suspect(func: torch._ops.OpOverload) -> bool:
    """Whether :func:`op_fault` or :func:`cuda_transfer_fault` can find something; else neither need be asked."""
    depends_on_data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    named = _INDEXING | _MOVES_STORAGE | _TRANSFERS | _NESTS | _CHECKS
    return func._schema.name in named or not depends_on_data.isdisjoint(func.tags)


def op_fault(func: torch._ops.OpOverload, args: Sequence[Any]) -> Fault | None:
    """What is wrong with an operator that would sync, or whose result shape depends on data."""
    name = func._schema.name
    if name in _INDEXING:
        if _has_bool_index(args) and not _fills_by_mask(name, args):
            return Fault(SHAPE, f"{func} with a boolean mask", "has a result whose shape depends on data")
        return None
    if torch.Tag.data_dependent_output in func.tags:
        return Fault(HOST_SYNC, str(func), "reads a device value on the host, which waits for the device")
    if torch.Tag.dynamic_output_shape in func.tags or name in _NESTS:
        return Fault(SHAPE, str(func), "has a result whose shape depends on data")
    if name in _MOVES_STORAGE and not _is_first_memory(name, args):
        return Fault(MOVE, str(func), "moves a tensor to other memory, and the graph holds the old address")
    return None


def _is_first_memory(name: str, args: Sequence[Any]) -> bool:
    """cuDNN's recurrent layers make themselves an empty tensor on the memory of their weights."""
    return name == "aten::set_" and bool(args[0].is_cuda) and not args[0].untyped_storage().nbytes()


_FORBIDDEN = ("when stream is capturing", "during CUDA graph capture")


def forbidden_fault(func: torch._ops.OpOverload, error: RuntimeError) -> Fault | None:
    """What is wrong with an operator whose own code did what no stream may do while it is captured, and so failed."""
    said = str(error).split("\n", 1)[0]
    if type(error) not in (RuntimeError, torch.AcceleratorError) or not any(words in said for words in _FORBIDDEN):
        return None
    return Fault(HOST_SYNC, str(func), f"does what no stream may do while it is captured ({said})")


def _check_fault(func: torch._ops.OpOverload) -> Fault | None:
    """Of the functions of ``torch.linalg`` that raise for a singular matrix."""
    if func._schema.name not in _CHECKS:
        return None
    why = "reads on the host whether it went well; torch.linalg.solve_ex, inv_ex and cholesky_ex do not"
    return Fault(HOST_SYNC, str(func), why)


def form_fault(func: Operator, given: Sequence[torch.Tensor]) -> Fault | None:
    """What is wrong with an operator on functions, or on tensors that are not one piece of memory."""
    if applies_functions(func):
        why = "applies functions, and only a compiler can put what of them runs into a graph"
        return Fault(FUNCTIONS, f"{func}()", why)
    scattered = next(filter(is_scattered, given), None)
    if scattered is not None:
        return Fault(LAYOUT, f"{func} on a {layout_of(scattered)} tensor", "uses memory that a plan cannot hold")
    return None


def cuda_transfer_fault(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
) -> Fault | None:
    """Host and device meet only through pinned memory and without waiting."""
    name = func._schema.name
    if name == "aten::copy_" and args[0].is_cuda != args[1].is_cuda:
        host = args[1] if args[0].is_cuda else args[0]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not (host.is_pinned() and non_blocking):
            why = "copies between host and device through pageable memory, or waits for the copy"
            return Fault(COPY, str(func), why)
    elif name == "aten::_to_copy" and kwargs.get("device") is not None:
        source, target = given[0], torch.device(kwargs["device"])
        if source.is_cuda and target.type == "cpu":
            return Fault(HOST_SYNC, str(func), "copies a device tensor to the host and waits for it")
        if not source.is_cuda and target.type == "cuda" and not (source.is_pinned() and kwargs.get("non_blocking")):
            return Fault(COPY, str(func), "uploads host data from pageable memory, or waits for the copy")
    return _check_fault(func) if any(t.is_cuda for t in given) else None


def cpu_transfer_fault(
    func: torch._ops.OpOverload, given: Sequence[torch.Tensor], is_host: Callable[[torch.Tensor], bool]
) -> Fault | None:
    """Like :func:`cuda_transfer_fault` where all memory is the host's: tensors tagged as the host's stand for it."""
    if all(is_host(t) for t in given):
        return None
    if any(is_host(t) for t in given) and func._schema.name == "aten::copy_":
        return Fault(COPY, str(func), "copies between host and device through pageable memory")
    if any(is_host(t) and t.dim() > 0 for t in given):
        what = f"{func} on a host tensor and a device tensor"
        return Fault(COPY, what, "mixes devices; make the host tensor on the device")
    return _check_fault(func)


def _names_the_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``Tensor.to`` was given the word "cpu": on the CPU device the only sign of a read from a GPU."""
    target = args[1] if len(args) > 1 else kwargs.get("device")
    return isinstance(target, str) and target.startswith("cpu")


def _is_number(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``torch.tensor`` and its like are asked for one number of Python on a device."""
    is_plain = len(args) == 1 and type(args[0]) in (bool, int, float, complex)
    return is_plain and kwargs.get("device") is not None and kwargs.keys() <= {"device", "dtype"}


class HostReadGuard(OnlyLooks):
    """Watches for calls that read a device tensor on the host, or upload host data, without the dispatcher seeing it.

    Args:
        is_device: Tells device tensors from host tensors.
        tag_host: Called with each tensor that is made on the host; None where the device shows in the tensor itself.
        report: What to do about one; by default it is refused. The call is run in the context that it returns.

    Attributes:
        enabled: Set while a segment is open; otherwise everything passes.
    """

    _READS = frozenset({"tolist", "numpy", "__array__", "cpu", "__dlpack__", "__repr__", "__format__"})
    _UPLOADS = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "from_numpy"})
    _WATCHED = _READS | _UPLOADS | {"to"}

    def __init__(
        self,
        is_device: Callable[[torch.Tensor], bool],
        tag_host: Callable[[torch.Tensor], None] | None,
        report: Callable[[Fault], AbstractContextManager[None]] = refuse,
    ) -> None:
        super().__init__()
        self._is_device = is_device
        self._tag_host = tag_host
        self._report = report
        self.enabled = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Every look at a tensor's shape comes by here: what nobody watches for goes on at once.
        if not self.enabled or (name := getattr(func, "__name__", "")) not in self._WATCHED:
            return func(*args, **kwargs)
        if name in self._UPLOADS and _is_number(args, kwargs):
            return torch.full((), *args, **kwargs)  # the same, filled in on the device; the number is baked in
        fault = self._fault(name, args, kwargs)
        with nullcontext() if fault is None else self._report(fault):
            made = func(*args, **kwargs)
        is_new = name in self._UPLOADS and kwargs.get("device") is None and self._is_host_data(args)
        if is_new and self._tag_host is not None and isinstance(made, torch.Tensor):
            self._tag_host(made)
        return made

    def _fault(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Fault | None:
        is_read = name in self._READS or (name == "to" and _names_the_host(args, kwargs))
        if is_read and args and isinstance(args[0], torch.Tensor) and self._is_device(args[0]):
            return Fault(HOST_SYNC, f"Tensor.{name}()", "copies a device tensor to the host and waits for it")
        if name in self._UPLOADS and self._is_host_data(args):
            if any(self._is_device(t) for t in tensors_in(args)):
                why = "reads their values on the host and waits for the device"
                return Fault(HOST_SYNC, f"torch.{name}() of device tensors", why)
            target = kwargs.get("device")
            if target is not None and (self._tag_host is not None or torch.device(target).type != "cpu"):
                return Fault(COPY, f"torch.{name}(data, device=...)", "uploads host data from pageable memory")
        return None

    @staticmethod
    def _is_host_data(args: Sequence[Any]) -> bool:
        return not (args and isinstance(args[0], torch.Tensor))

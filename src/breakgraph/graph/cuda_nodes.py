"""The nodes of a CUDA graph in words, for an audit: read through the driver, addresses told as block and offset."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from breakgraph.graph.device import Block, RecordedCall

_WORD = 8
_TYPES = {
    0: "kernel", 1: "memcpy", 2: "memset", 3: "host function", 4: "child graph", 5: "empty", 6: "event wait",
    7: "event record", 10: "allocation", 11: "free", 13: "conditional",
}  # fmt: skip
_KERNEL, _MEMCPY, _MEMSET, _CHILD = 0, 1, 2, 4
_WITHOUT_ARGUMENTS = {5, 6, 7}
_BUFFER_POINTER, _BUFFER_SIZE, _MEMORY_TYPE = 1, 2, 2  # CU_LAUNCH_PARAM_*, CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_INVALID_VALUE = 1
_ATTRIBUTES = {"cooperative": (2, 4), "cluster": (4, 12), "priority": (8, 4)}  # CUlaunchAttributeID, bytes of its value


class KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class MemsetParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``."""

    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _CopyEnd(ctypes.Structure):
    _fields_ = [
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("lod", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class MemcpyParams(ctypes.Structure):
    """``CUDA_MEMCPY3D``."""

    _fields_ = [
        ("src", _CopyEnd),
        ("dst", _CopyEnd),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    ]


class Places:
    """Tells where an address lies, in words that are equal for two captures of the same thing.

    Args:
        pool: The runs of the pool.
        pins: The storages outside the pool that the graph reads.
        numbers: Numbers of blocks by address, in the order of their first use; continued.
        is_address: Whether the driver knows a number as an address.
    """

    def __init__(
        self,
        pool: Iterable[Block],
        pins: Iterable[Block],
        numbers: dict[int, int],
        is_address: Callable[[int], bool],
    ) -> None:
        kinds = [*((block, "pool") for block in pool), *((block, "outside") for block in pins)]
        self._blocks = sorted(kinds, key=lambda item: item[0].address)
        self._starts = [block.address for block, _ in self._blocks]
        self._numbers = numbers
        self._is_address = is_address

    def of(self, address: int) -> str | None:
        """Block and offset, or None outside of all blocks. An address one past a block is not in it."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block, kind = self._blocks[index]
        offset = address - block.address
        if offset >= block.nbytes:
            return None
        return f"{kind} {self._numbers.setdefault(block.address, len(self._numbers))}+{offset}"

    def words(self, name: str, raw: bytes) -> tuple[dict[str, str], list[str]]:
        """One parameter, eight bytes at a time: (words by name, words that hold an address of an unknown block)."""
        known: dict[str, str] = {}
        unread: list[str] = []
        for start in range(0, len(raw), _WORD):
            part = raw[start : start + _WORD]
            value = int.from_bytes(part, "little")
            word = f"{name}[{start}]" if len(raw) > _WORD else name
            place = self.of(value) if len(part) == _WORD else None
            if place is None and len(part) == _WORD and self._is_address(value):
                unread.append(f"{word} is an address outside of all known blocks")
            else:
                known[word] = place or f"{value:#x}"
        return known, unread


class Driver(Protocol):
    """``libcuda``: functions that return a status, 0 for success."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


def known_to(driver: Driver) -> Callable[[int], bool]:
    """Whether the driver knows a number as an address of device or pinned memory."""

    def is_address(value: int) -> bool:
        if value < 1 << 32:
            return False
        kind = ctypes.c_uint(0)
        status = driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(value))
        return status == 0

    return is_address


def read_graph(driver: Driver, raw_graph: int, places: Places) -> list[RecordedCall]:
    """Every node of a ``cudaGraph_t``, those of child graphs included, in the order in which they were added."""
    count = ctypes.c_size_t(0)
    status = driver.cuGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    status = status or driver.cuGraphGetNodes(ctypes.c_void_p(raw_graph), nodes, ctypes.byref(count))
    if status:
        return [RecordedCall("graph", {}, (f"its nodes: the driver said {status}",))]
    calls: list[RecordedCall] = []
    for address in nodes:
        node, kind = ctypes.c_void_p(address), ctypes.c_int(-1)
        status = driver.cuGraphNodeGetType(node, ctypes.byref(kind))
        if status == 0 and kind.value == _CHILD:
            child = ctypes.c_void_p(0)
            status = driver.cuGraphChildGraphNodeGetGraph(node, ctypes.byref(child))
            if status == 0:
                calls += read_graph(driver, child.value or 0, places)
                continue
        calls.append(_read_node(driver, node, kind.value if status == 0 else -1, places))
    return calls


def _read_node(driver: Driver, node: ctypes.c_void_p, kind: int, places: Places) -> RecordedCall:
    name = _TYPES.get(kind, f"node of type {kind}")
    if kind == _KERNEL:
        return _read_kernel(driver, node, places)
    if kind == _MEMSET:
        memset = MemsetParams()
        status = driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(memset))
        return _failed(name, status) if status else _record(name, _fields(memset), places)
    if kind == _MEMCPY:
        memcpy = MemcpyParams()
        status = driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(memcpy))
        return _failed(name, status) if status else _record(name, _fields(memcpy), places)
    return RecordedCall(name, {}) if kind in _WITHOUT_ARGUMENTS else RecordedCall(name, {}, ("its arguments",))


def _read_kernel(driver: Driver, node: ctypes.c_void_p, places: Places) -> RecordedCall:
    params = KernelParams()
    status = driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params))
    if status:
        return _failed("kernel", status)
    kind, handle = ("Func", params.func) if params.func else ("Kernel", params.kern)
    text = ctypes.c_char_p()
    status = getattr(driver, f"cu{kind}GetName")(ctypes.byref(text), ctypes.c_void_p(handle))
    name = (text.value or b"").decode(errors="replace") if status == 0 else "kernel without a name"
    values = {"grid": bytes(params.grid), "block": bytes(params.block), "shared_bytes": _int(params.shared_bytes)}
    unread = []
    for attribute, (number, nbytes) in _ATTRIBUTES.items():
        buffer = (ctypes.c_ubyte * 64)()
        if driver.cuGraphKernelNodeGetAttribute(node, number, ctypes.byref(buffer)):
            unread.append(f"attribute {attribute}")
        else:
            values[attribute] = bytes(buffer[:nbytes])
    call = _record(name, values, places, is_address_possible=False)
    found, missing = _kernel_arguments(driver, params, kind, handle)
    inputs = _record(name, found, places)
    return RecordedCall(name, call.arguments | inputs.arguments, (*unread, *call.unread, *inputs.unread, *missing))


def _kernel_arguments(
    driver: Driver, params: KernelParams, kind: str, handle: int
) -> tuple[dict[str, bytes], list[str]]:
    """The bytes of each parameter, sizes asked of the driver (12.4 or later); ``extra`` holds all of them in one
    buffer. Then what could not be read."""
    packed = _packed(params.extra) if params.extra else None
    found: dict[str, bytes] = {}
    get = getattr(driver, f"cu{kind}GetParamInfo")
    offset, nbytes = ctypes.c_size_t(0), ctypes.c_size_t(0)
    index = 0
    missing: list[str] = []
    while (status := get(ctypes.c_void_p(handle), index, ctypes.byref(offset), ctypes.byref(nbytes))) == 0:
        if packed is not None:
            found[f"parameter {index}"] = packed[offset.value : offset.value + nbytes.value]
        elif params.params and params.params[index]:
            found[f"parameter {index}"] = ctypes.string_at(params.params[index], nbytes.value)
        else:
            missing.append(f"parameter {index}")
        index += 1
    if status != _INVALID_VALUE:  # which is what the driver says past the last one
        missing.append(f"parameters from {index} on: the driver said {status}")
    return found, missing


def _packed(extra: Any) -> bytes:
    """The buffer that a launch's ``extra`` list names."""
    address, nbytes, index = 0, 0, 0
    while (key := extra[index]) not in (None, 0):
        if key == _BUFFER_POINTER:
            address = extra[index + 1]
        elif key == _BUFFER_SIZE:
            nbytes = ctypes.c_size_t.from_address(extra[index + 1]).value
        index += 2
    return ctypes.string_at(address, nbytes)


def _fields(structure: ctypes.Structure, prefix: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            found |= _fields(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _int(value)
    return found


def _int(value: int) -> bytes:
    return value.to_bytes(_WORD, "little", signed=value < 0)


def _record(
    name: str, values: dict[str, bytes], places: Places, *, is_address_possible: bool = True
) -> RecordedCall:  # fmt: skip
    arguments: dict[str, str] = {}
    unread: list[str] = []
    for argument, raw in values.items():
        if is_address_possible:
            known, unknown = places.words(argument, raw)
            arguments |= known
            unread += unknown
        else:
            arguments[argument] = raw.hex()
    return RecordedCall(name, arguments, tuple(unread))


def _failed(name: str, status: int) -> RecordedCall:
    return RecordedCall(name, {}, (f"its arguments: the driver said {status}",))

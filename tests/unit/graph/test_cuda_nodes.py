"""Reading graph nodes: the layout of the driver's structures, words and places, and a driver made of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from breakgraph.graph.audit import compare
from breakgraph.graph.cuda_nodes import KernelParams, MemcpyParams, MemsetParams, Places, known_to, read_graph
from breakgraph.graph.device import Block, RecordedCall

POOL, WEIGHT, ELSEWHERE = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000


def places(is_address: Callable[[int], bool] = lambda value: value >= POOL) -> Places:
    return Places([Block(POOL, 4096)], [Block(WEIGHT, 64)], {}, is_address)


@pytest.mark.parametrize(
    ("structure", "nbytes", "field", "offset"),
    [
        (KernelParams, 72, "params", 40),
        (KernelParams, 72, "kern", 56),
        (MemsetParams, 40, "width", 24),
        (MemcpyParams, 200, "dst", 88),
        (MemcpyParams, 200, "depth", 192),
    ],
)
def test_structures_are_laid_out_as_the_driver_has_them(
    structure: type[ctypes.Structure], nbytes: int, field: str, offset: int
) -> None:
    assert ctypes.sizeof(structure) == nbytes
    assert getattr(structure, field).offset == offset


def test_addresses_become_places_numbered_by_first_use() -> None:
    found = places()
    assert found.of(WEIGHT + 8) == "outside 0+8"
    assert found.of(POOL + 512) == "pool 1+512"
    assert found.of(WEIGHT) == "outside 0+0"
    assert found.of(WEIGHT + 64) is None
    assert found.of(POOL - 1) is None


def test_a_parameter_is_read_in_words() -> None:
    raw = (WEIGHT + 16).to_bytes(8, "little") + (7).to_bytes(8, "little") + (3).to_bytes(4, "little")
    assert places().words("p", raw) == ({"p[0]": "outside 0+16", "p[8]": "0x7", "p[16]": "0x3"}, [])


def test_an_address_of_an_unknown_block_is_unread() -> None:
    known, unread = places().words("p", ELSEWHERE.to_bytes(8, "little"))
    assert known == {}
    assert unread == ["p is an address outside of all known blocks"]


def put(reference: Any, value: object) -> None:
    """Write through what ``ctypes.byref`` made."""
    reference._obj.value = value


class OneKernel:
    """A driver with one graph of one kernel, whose parameters are given as bytes."""

    def __init__(self, parameters: list[bytes], past_the_end: int = 1, is_packed: bool = False) -> None:
        self.buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in parameters]
        self.addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, self.buffers))
        self.past_the_end = past_the_end
        self.packed = ctypes.create_string_buffer(b"".join(parameters), sum(map(len, parameters)))
        self.nbytes = ctypes.c_size_t(len(self.packed))
        extra = [1, ctypes.addressof(self.packed), 2, ctypes.addressof(self.nbytes), 0]
        self.extra = (ctypes.c_void_p * 5)(*extra)
        self.is_packed = is_packed

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        put(count, 1)
        if nodes is not None:
            nodes[0] = 0xABC
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        put(kind, 0)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        params._obj.kern = 0x123
        params._obj.grid[0] = 5
        pointer = ctypes.POINTER(ctypes.c_void_p)
        if self.is_packed:
            params._obj.extra = ctypes.cast(self.extra, pointer)
        else:
            params._obj.params = ctypes.cast(self.addresses, pointer)
        return 0

    def cuKernelGetName(self, name: Any, handle: Any) -> int:
        put(name, b"scale")
        return 0

    def cuKernelGetParamInfo(self, handle: Any, index: int, offset: Any, nbytes: Any) -> int:
        if index >= len(self.buffers):
            return self.past_the_end
        put(offset, sum(len(buffer) for buffer in self.buffers[:index]))
        put(nbytes, len(self.buffers[index]))
        return 0

    def cuGraphKernelNodeGetAttribute(self, node: Any, number: int, value: Any) -> int:
        return 1 if number == 8 else 0

    def cuPointerGetAttribute(self, kind: Any, attribute: int, value: Any) -> int:
        return 0 if value.value == ELSEWHERE else 1


def read(*parameters: bytes, **options: Any) -> RecordedCall:
    driver: Any = OneKernel(list(parameters), **options)
    (call,) = read_graph(driver, 1, places(known_to(driver)))
    return call


@pytest.mark.parametrize("is_packed", [False, True])
def test_f14_a_kernel_argument_that_differs_is_named(is_packed: bool) -> None:
    pointer = WEIGHT.to_bytes(8, "little")
    one = read(pointer, (3).to_bytes(4, "little"), is_packed=is_packed)
    two = read(pointer, (4).to_bytes(4, "little"), is_packed=is_packed)
    assert one.arguments["parameter 0"] == "outside 0+0"
    assert one.arguments["grid"].startswith("05")
    (difference,) = compare([[one]], [[two]]).differences
    assert (difference.name, difference.argument) == ("scale", "parameter 1")
    assert (difference.first, difference.second) == ("0x3", "0x4")


def test_what_the_driver_does_not_tell_is_listed() -> None:
    call = read(ELSEWHERE.to_bytes(8, "little"), past_the_end=999)
    assert call.unread == (
        "attribute priority",
        "parameter 0 is an address outside of all known blocks",
        "parameters from 1 on: the driver said 999",
    )
    assert compare([[call]], [[call]]).coverage < 1

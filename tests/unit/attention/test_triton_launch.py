"""Repeated launches, with a stand-in for a kernel that is compiled for what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from breakgraph.attention import triton_launch
from breakgraph.attention.triton_launch import RepeatedLaunch

OPTIONS = {"BLOCK": 16, "WIDE": False, "num_warps": 4}


class Compiled:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """As Triton's: it gives the variant that it launched; `None` in the interpreter."""

    arg_names = ("out", "x", "rows", "stride", "BLOCK", "WIDE")

    def __init__(self, *, compiles: bool = True) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.variants: list[Compiled] = []
        self._compiles = compiles

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> Compiled | None:
            assert options == OPTIONS
            self.slow.append((grid, *arguments))
            self.variants.append(Compiled())
            return self.variants[-1] if self._compiles else None

        return launch


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "CompiledKernel", Compiled)


def launch(call: RepeatedLaunch, x: torch.Tensor, *, stride: int = 32, rows: int = 3, like: str = "a") -> None:
    call.on(like, (x, None), (stride,), OPTIONS)((rows, 1, 1), (x,), (rows,))


def test_the_second_launch_hands_over_addresses_numbers_and_constants_in_the_order_of_the_parameters() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    call = RepeatedLaunch(kernel)
    launch(call, x)
    launch(call, x[16:], rows=5, stride=64)
    assert kernel.slow == [((3, 1, 1), x, x, 3, 32)]
    address = x.data_ptr() + 64
    assert kernel.variants[0].calls == [((5, 1, 1), (address, address, 5, 64, 16, False))]


@pytest.mark.parametrize(
    "other",
    [{"stride": 8}, {"stride": 1}, {"like": "b"}],
    ids=["a stride that is no multiple of 16", "a stride of 1", "other constants"],
)
def test_what_triton_compiles_for_is_another_variant(other: dict[str, Any]) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    call = RepeatedLaunch(kernel)
    launch(call, x)
    launch(call, x, **other)
    launch(call, x, **other)
    assert len(kernel.slow) == 2
    assert [len(variant.calls) for variant in kernel.variants] == [0, 1]


def test_a_tensor_of_another_dtype_is_another_variant() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    call = RepeatedLaunch(kernel)
    launch(call, x)
    launch(call, x.view(torch.int32))
    launch(call, x)
    assert len(kernel.slow) == 2


def test_addresses_off_the_alignment_are_left_to_triton() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    call = RepeatedLaunch(kernel)
    for tensor in (x[1:], x[1:], x, x[1:], x):
        launch(call, tensor)
    assert len(kernel.slow) == 4
    assert len(kernel.variants[2].calls) == 1


def test_a_bound_launch_reads_its_own_tensors_once_and_those_it_is_given_each_time() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    bound = RepeatedLaunch(kernel).on("a", (x, None), (32,), OPTIONS)
    for other, rows in ((x[16:], 3), (x[32:], 4), (x[1:], 5), (x[48:], 6)):
        bound((rows, 1, 1), (other,), (rows,))
    assert [(call[1] is x, call[2].data_ptr() - x.data_ptr(), call[3]) for call in kernel.slow] == [
        (True, 64, 3),
        (True, 4, 5),
    ]
    address = x.data_ptr()
    assert kernel.variants[0].calls == [
        ((4, 1, 1), (address, address + 128, 4, 32, 16, False)),
        ((6, 1, 1), (address, address + 192, 6, 32, 16, False)),
    ]


def test_the_interpreter_keeps_nothing() -> None:
    kernel, x = Kernel(compiles=False), torch.zeros(64)
    call = RepeatedLaunch(kernel)
    launch(call, x)
    launch(call, x)
    assert len(kernel.slow) == 2

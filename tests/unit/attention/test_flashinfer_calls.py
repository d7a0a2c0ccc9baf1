"""FlashInfer's calls, learnt from a stand-in for its wrapper that arranges its arguments as the package does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from breakgraph.attention.flashinfer_calls import PlanCall, RunCall
from breakgraph.errors import ConfigError


class Wrapper:
    """Looks at what it is given, then calls its module; `calls` are those."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._module = SimpleNamespace(plan=self._note("plan", [7]), paged_run=self._note("run", None))
        self._cached_module: Any = None
        self._jit_module: Any = None
        self._plan_info: Any = None

    def _note(self, name: str, result: object) -> Any:
        def call(*arguments: object) -> object:
            self.calls.append((name, arguments))
            return result

        return call

    def plan(self, rows: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, lens: torch.Tensor) -> None:
        self._cached_module = self._jit_module or self._module
        self._qo_indptr_last = int(rows[-1])
        self._qo_indptr_buf, self._paged_kv_indptr_buf = rows.clone(), pages.clone()
        self._paged_kv_last_page_len_buf, self._paged_kv_indices_buf = last.clone(), torch.zeros(3)
        workspaces = [torch.zeros(1) for _ in range(3)]
        self._plan_info = self._cached_module.plan(*workspaces, rows, pages, lens, int(rows[-1]), len(lens), 8, False)

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, ...], *extra: object, out: torch.Tensor) -> None:
        assert len(q) == self._qo_indptr_last
        self._cached_module.paged_run(
            torch.zeros(1), self._plan_info, q, *cache, self._qo_indptr_buf, self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf, out, 0.5, *extra, self._qo_indptr_buf,
        )  # fmt: skip


def planned() -> tuple[Wrapper, PlanCall]:
    wrapper = Wrapper()
    rows, pages, last, lens = (torch.tensor(v, dtype=torch.int32) for v in ([0, 5], [0, 2], [1], [17]))
    wrapper.plan(rows, pages, last, lens)
    call = PlanCall(wrapper, lambda: wrapper.plan(rows, pages, last, lens), (rows, pages, lens))
    return wrapper, call


def test_a_plan_is_that_of_the_step_it_is_given() -> None:
    wrapper, call = planned()
    assert [name for name, _ in wrapper.calls] == ["plan"]
    assert wrapper._jit_module is None
    host = [torch.tensor(v) for v in ([0, 2, 9], [0, 1, 3], [16, 30])]
    assert call.of_step(host, num_rows=9) == [7]
    name, arguments = wrapper.calls[-1]
    assert name == "plan"
    assert all(a is b for a, b in zip(arguments[3:6], host, strict=True))
    assert arguments[6:] == (9, 2, 8, False)


@pytest.mark.parametrize("num_extra", [0, 1])
def test_a_launch_has_the_plan_and_the_layer_it_is_given(num_extra: int) -> None:
    wrapper, _ = planned()
    first = [torch.zeros(3) for _ in range(4 + num_extra)]
    call = RunCall(wrapper, first, first[4:])
    assert [name for name, _ in wrapper.calls] == ["plan"]
    assert not any(argument is tensor for argument in call.arguments for tensor in first)
    buffers = [torch.zeros(2) for _ in range(4)]
    for info in ([1], [2]):
        call.use_plan(info, buffers)
        layer = [torch.zeros(3) for _ in range(4 + num_extra)]
        call.of_layer(layer)
        _, arguments = wrapper.calls[-1]
        q, keys, values, out, *extra = layer
        rows, pages, last, indices = buffers
        expected = [info, q, keys, values, rows, pages, indices, last, out, 0.5, *extra, rows]
        assert all(a is b or a == 0.5 for a, b in zip(arguments[1:], expected, strict=True))
        assert not any(argument is tensor for argument in call.arguments for tensor in layer)


def test_a_wrapper_that_calls_otherwise_is_refused_by_name() -> None:
    wrapper, _ = planned()
    layer = [torch.zeros(3) for _ in range(4)]
    wrapper._plan_info = object()
    wrapper.run = lambda q, cache, *extra, out: wrapper._cached_module.paged_run(q, out)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"knows flashinfer-python 0\.6\.14.*calls its compiled module with other"):
        RunCall(wrapper, layer, ())

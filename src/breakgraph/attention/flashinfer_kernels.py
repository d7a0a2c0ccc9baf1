"""FlashInfer's paged attention kernels, one wrapper a plan, and the operator that a graph records of them.

Only flashinfer.py imports this module, and when an instance is made: the package takes seconds to import.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.jit.attention.variants import attention_sink_decl

from breakgraph.attention.flashinfer_plan import (
    Family,
    FixedShape,
    PlanConstants,
    StepLayout,
    fill_slots,
    float_workspace_bytes,
    int_workspace_bytes,
    lay_out,
)
from breakgraph.attention.triton_ops import store
from breakgraph.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class StepPages:
    """A step's layout where FlashInfer wants it: everything in pinned host memory but the pages themselves."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    indices: torch.Tensor
    """[number of pages] int32 on the device, request by request."""
    max_q_len: int

    @classmethod
    def stage(cls, layout: StepLayout, block_tables: torch.Tensor) -> StepPages:
        """`block_tables` [R, width] on the device. One copy goes there, from fresh pinned memory; nothing waits."""
        parts = (layout.qo_indptr, layout.kv_indptr, layout.last_page_len, layout.seq_lens, layout.page_positions)
        host = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=True)
        np.concatenate(parts, out=host.numpy())
        qo_indptr, kv_indptr, last_page_len, seq_lens, positions = host.split([len(part) for part in parts])
        indices = block_tables.flatten().index_select(0, positions.to(block_tables.device, non_blocking=True))
        return cls(qo_indptr, kv_indptr, last_page_len, seq_lens, indices, layout.max_q_len)


class Scratch:
    """Device memory that kernels of different steps use by turns, all on one stream; it grows, it never moves.

    A kernel keeps the buffer that it was made with, so a larger one that comes later disturbs no graph.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._buffer: torch.Tensor | None = None

    def take(self, size: int) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.zeros(size, dtype=self._dtype, device=self._device)
        return self._buffer


class _Launch:
    """The call that a wrapper's `run` makes into its compiled module, with the tensors of another layer in it.

    `run` looks at its arguments for longer than the launch takes, and between two plans they differ in the layer's
    tensors only.
    """

    def __init__(self, wrapper: Any, tensors: Sequence[torch.Tensor], extra: Sequence[object]) -> None:
        """Learns the call from one `wrapper.run` on (q, key_cache, value_cache, out, ...); launches nothing."""
        module, seen = wrapper._cached_module, []
        wrapper._cached_module = SimpleNamespace(paged_run=lambda *arguments: seen.append(arguments))
        q, key_cache, value_cache, out, *_ = tensors
        try:
            wrapper.run(q, (key_cache, value_cache), *extra, out=out)
        finally:
            wrapper._cached_module = module
        self._function = module.paged_run
        self._arguments: list[object] = list(_only(seen))
        self._places = [_only(i for i, a in enumerate(self._arguments) if a is tensor) for tensor in tensors]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        arguments = self._arguments
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        self._function(*arguments)
        for place in self._places:
            arguments[place] = None  # a capture's pool blocks may not outlive it


def _only(items: Iterable[T]) -> T:
    (item,) = items
    return item


class PlannedKernel:
    """FlashInfer's kernel for layers of the same constants, and the plan of the latest step.

    With `fixed`, all plans have the same launch parameters and write the same device buffers, so a graph that holds
    the kernel is right for whatever was planned last. Both hold because FlashInfer's graph mode derives them from the
    largest number of rows, which the first plan sets, and from the number of requests.

    Owns: the wrapper, its integer workspace on both sides, its index buffers. Borrows: the scratch.
    """

    def __init__(
        self,
        constants: PlanConstants,
        family: Family,
        dtype: torch.dtype,
        fixed: FixedShape | None,
        floats: Scratch,
        pages: Scratch,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.constants, self.family, self.fixed = constants, family, fixed
        self.serial = 0
        """Which step the plan is for; 0: none."""
        self.handle = next(_HANDLES)
        self._dtype, self._block_size, self._device = dtype, block_size, device
        self._copied = torch.cuda.Event()
        self._launch: _Launch | None = None
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        float_workspace = floats.take(float_workspace_bytes(constants, family, fixed, num_sms))
        int_workspace = torch.zeros(
            int_workspace_bytes(constants, family, fixed, num_sms), dtype=torch.uint8, device=device
        )
        self.buffers = [float_workspace, int_workspace]
        """What the kernel reads and writes besides its arguments."""
        indices: dict[str, torch.Tensor] = {}
        if fixed is not None:
            indices = {
                "qo_indptr_buf": torch.zeros(fixed.num_slots + 1, dtype=torch.int32, device=device),
                "paged_kv_indptr_buf": torch.zeros(fixed.num_slots + 1, dtype=torch.int32, device=device),
                "paged_kv_last_page_len_buf": torch.zeros(fixed.num_slots, dtype=torch.int32, device=device),
                "paged_kv_indices_buf": pages.take(fixed.max_pages),
            }
            self.buffers += indices.values()
        try:
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
                float_workspace, "NHD", use_cuda_graph=fixed is not None, backend=family,
                **indices, **sink_module(constants, family, dtype),
            )  # fmt: skip
            self._wrapper.reset_workspace_buffer(float_workspace, int_workspace)
            self._plan_largest()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as failure:
            raise ConfigError(
                f"attention 'flashinfer' could not set up its {family} kernel for {constants}: {failure}; kernels are "
                "compiled on first use, with nvcc and ninja (or come with the package flashinfer-jit-cache); without "
                "them use attention='triton'"
            ) from failure
        _KERNELS[self.handle] = self

    def plan(self, pages: StepPages, serial: int) -> None:
        """Makes this step the one that `run` computes.

        FlashInfer writes the plan into pinned memory that it keeps, and copies it to the device behind what the stream
        already does. So this waits on the host until the copy of the plan before has been made; the kernels that read
        that plan on the device come before the new copy in stream order.
        """
        self._copied.synchronize()
        constants = self.constants
        self._wrapper.plan(
            pages.qo_indptr, pages.kv_indptr, pages.indices, pages.last_page_len,
            constants.num_heads, constants.num_kv_heads, constants.head_dim, self._block_size,
            causal=True, sm_scale=constants.scale, window_left=constants.window_left,
            logits_soft_cap=constants.softcap, q_data_type=self._dtype, kv_data_type=self._dtype,
            seq_lens=pages.seq_lens, max_token_per_sequence=pages.max_q_len,
        )  # fmt: skip
        self._copied.record()
        self._launch = None
        self.serial = serial

    def run(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Fills `out` [T, H, D] from `q` [T, H, D], T the planned rows; `sinks` [H] float32."""
        tensors = (q, key_cache, value_cache, out) if sinks is None else (q, key_cache, value_cache, out, sinks)
        if self._launch is None:
            extra = () if sinks is None else (sinks, self.constants.scale)
            self._launch = _Launch(self._wrapper, tensors, extra)
        self._launch(tensors)

    def _plan_largest(self) -> None:
        """Compiles the module, and in graph mode sets the most rows that a plan may have."""
        shape = self.fixed or FixedShape(num_rows=1, num_slots=1, table_width=1)
        # One request with every row, or one row in each slot where there are as many: no more rows can ever come.
        each = 1 if shape.num_rows == shape.num_slots else 0
        q_lens = fill_slots((shape.num_rows - each * (shape.num_slots - 1),), shape.num_slots, each)
        layout = lay_out(q_lens, fill_slots((1,), shape.num_slots, each), self._block_size, shape.table_width)
        tables = torch.zeros(shape.num_slots, shape.table_width, dtype=torch.int32, device=self._device)
        self.plan(StepPages.stage(layout, tables), serial=0)


def sink_module(constants: PlanConstants, family: Family, dtype: torch.dtype) -> dict[str, object]:
    """The wrapper's arguments for FlashInfer's attention with sinks, a variant that is compiled under a name of ours.

    The wrapper that FlashInfer has for it names the compiled module without the head size: two sizes in one process
    would share one module.
    """
    if not constants.has_sinks:
        return {}
    windowed = constants.window is not None
    kind, size = str(dtype).removeprefix("torch."), constants.head_dim
    name = f"breakgraph_attention_sink_{kind}_{size}_{'window' if windowed else 'all'}_{family}"
    arguments = [
        name, dtype, dtype, dtype, torch.int32, size, size,
        ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", attention_sink_decl[family],
    ]  # fmt: skip
    return {"jit_args": arguments, "jit_kwargs": {"use_sliding_window": windowed}}


_HANDLES = itertools.count()
_KERNELS: WeakValueDictionary[int, PlannedKernel] = WeakValueDictionary()


def attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    sinks: torch.Tensor | None,
    buffers: list[torch.Tensor],
    handle: int,
    out: torch.Tensor,
    stored: bool,
) -> None:
    """Stores k and v [T, Hk, D] at `slots` [T] unless `stored`, then fills `out` [T, H, D] by the kernel's latest plan.

    With `starts`, running sums of new tokens, rows behind the last request store nothing. `buffers` are the kernel's:
    named here for whoever looks at what an operator reads.
    """
    if not stored:
        # Triton launches on the current device, whatever its arguments; FlashInfer on that of its tensors.
        with torch.cuda.device(q.device):
            store(k, v, slots, starts, key_cache, value_cache)
    _KERNELS[handle].run(q, key_cache, value_cache, sinks, out)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define(
    "flashinfer_attention(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor? starts, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor? sinks, Tensor(c!)[] buffers, int handle, Tensor(d!) out, bool stored) -> ()"
)
_LIBRARY.impl("flashinfer_attention", attend_paged, "CUDA")
_LIBRARY.impl("flashinfer_attention", lambda *args: None, "Meta")

recorded_attention = torch.ops.breakgraph.flashinfer_attention.default
"""`attend_paged` as an operator, which captures see."""

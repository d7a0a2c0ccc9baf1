"""FlashInfer's paged attention kernels, one wrapper a plan, and the operator that a graph records of them.

Only flashinfer.py imports this module, and when an instance is made: the package takes seconds to import.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.jit.attention.variants import attention_sink_decl

from breakgraph.attention.flashinfer_calls import PlanCall, RunCall, UnknownFlashInfer
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
from breakgraph.attention.step import HostTables
from breakgraph.attention.triton_ops import store
from breakgraph.errors import ConfigError


@dataclass(frozen=True)
class StepPages:
    """A step's layout where FlashInfer wants it, int32. R requests."""

    qo_indptr: torch.Tensor
    """[R + 1] in pinned host memory, as the next two."""
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    """[R]"""
    seq_lens: torch.Tensor
    """[R]"""
    on_device: torch.Tensor
    """[3R + 2], the first three one behind the other."""
    indices: torch.Tensor
    """[number of pages] on the device, request by request."""
    max_q_len: int

    @property
    def for_plan(self) -> tuple[torch.Tensor, ...]:
        return self.qo_indptr, self.kv_indptr, self.seq_lens

    @property
    def num_rows(self) -> int:
        return int(self.qo_indptr[-1])

    @classmethod
    def stage(
        cls, layout: StepLayout, block_tables: torch.Tensor | HostTables, device: torch.device
    ) -> StepPages:  # fmt: skip
        """`block_tables` [R, width] on the device, or R rows on the host. One copy goes to the device, out of fresh
        pinned memory; nothing waits."""
        pages = layout.page_positions if isinstance(block_tables, torch.Tensor) else layout.pages_of(block_tables)
        parts = (layout.qo_indptr, layout.kv_indptr, layout.last_page_len, layout.seq_lens, pages)
        sizes = [len(part) for part in parts]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        np.concatenate(parts, out=host.numpy())
        copy = host.to(device, non_blocking=True)
        on_device, _, indices = copy.split([sum(sizes[:3]), *sizes[3:]])
        if isinstance(block_tables, torch.Tensor):
            indices = block_tables.flatten().index_select(0, indices)
        qo_indptr, kv_indptr, last_page_len, seq_lens, _ = host.split(sizes)
        return cls(qo_indptr, kv_indptr, last_page_len, seq_lens, on_device, indices, layout.max_q_len)

    def split(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of a tensor like `on_device`: its three parts."""
        return packed.split([len(self.qo_indptr), len(self.kv_indptr), len(self.last_page_len)])


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
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        float_workspace = floats.take(float_workspace_bytes(constants, family, fixed, num_sms))
        int_workspace = torch.zeros(
            int_workspace_bytes(constants, family, fixed, num_sms), dtype=torch.uint8, device=device
        )
        self.buffers = [float_workspace, int_workspace]
        """What the kernel reads and writes besides its arguments."""
        indices: dict[str, torch.Tensor] = {}
        if fixed is not None:
            slots = fixed.num_slots
            self._packed = torch.zeros(3 * slots + 2, dtype=torch.int32, device=device)
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf")
            indices = dict(zip(names, self._packed.split([slots + 1, slots + 1, slots]), strict=True))
            indices["paged_kv_indices_buf"] = pages.take(fixed.max_pages)
            self._index_buffers = tuple(indices.values())
            self.buffers += self._index_buffers
        try:
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
                float_workspace, "NHD", use_cuda_graph=fixed is not None, backend=family,
                **indices, **sink_module(constants, family, dtype),
            )  # fmt: skip
            self._wrapper.reset_workspace_buffer(float_workspace, int_workspace)
            self._plan = self._plan_largest()
            self._run = self._learn_run()
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except AttributeError as missing:
            raise UnknownFlashInfer(str(missing)) from missing
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
        self.serial = 0  # until all of it is there
        self._copied.synchronize()
        buffers: tuple[torch.Tensor, ...] = (*pages.split(pages.on_device), pages.indices)
        num_rows = pages.num_rows
        if self.fixed is not None:
            self._packed.copy_(pages.on_device)
            self._index_buffers[3][: len(pages.indices)].copy_(pages.indices)
            buffers, num_rows = self._index_buffers, self.fixed.num_rows
        self._run.use_plan(self._plan.of_step(pages.for_plan, num_rows), buffers)
        self._copied.record()
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
        tensors = (q, key_cache, value_cache, out)
        self._run.of_layer(tensors if sinks is None else (*tensors, sinks))

    def _learn_run(self) -> RunCall:
        """On tensors of one row and one page: nothing is launched."""
        heads, kv_heads, size = self.constants.num_heads, self.constants.num_kv_heads, self.constants.head_dim
        shapes = [(1, heads, size), *[(1, self._block_size, kv_heads, size)] * 2, (1, heads, size)]
        tensors = [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]
        extra: list[object] = []
        if self.constants.has_sinks:
            tensors.append(torch.empty(heads, dtype=torch.float32, device=self._device))
            extra = [tensors[-1], self.constants.scale]
        return RunCall(self._wrapper, tensors, extra)

    def _plan_largest(self) -> PlanCall:
        """Compiles the module, and in graph mode sets the most rows that a plan may have; learns how to plan."""
        shape = self.fixed or FixedShape(num_rows=1, num_slots=1, table_width=1)
        # One request with every row, or one row in each slot where there are as many: no more rows can ever come.
        each = 1 if shape.num_rows == shape.num_slots else 0
        q_lens = fill_slots((shape.num_rows - each * (shape.num_slots - 1),), shape.num_slots, each)
        layout = lay_out(q_lens, fill_slots((1,), shape.num_slots, each), self._block_size, shape.table_width)
        tables = torch.zeros(shape.num_slots, shape.table_width, dtype=torch.int32, device=self._device)
        pages, constants = StepPages.stage(layout, tables, self._device), self.constants

        def plan() -> None:
            self._wrapper.plan(
                pages.qo_indptr, pages.kv_indptr, pages.indices, pages.last_page_len,
                constants.num_heads, constants.num_kv_heads, constants.head_dim, self._block_size,
                causal=True, sm_scale=constants.scale, window_left=constants.window_left,
                logits_soft_cap=constants.softcap, q_data_type=self._dtype, kv_data_type=self._dtype,
                seq_lens=pages.seq_lens, max_token_per_sequence=pages.max_q_len,
            )  # fmt: skip

        plan()
        self._copied.record()
        return PlanCall(self._wrapper, plan, pages.for_plan)


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

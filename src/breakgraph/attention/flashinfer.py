"""FlashInfer: prompts, mixed batches and decode from the paged cache, planned on the host once a step.

The kernels are compiled on first use, for minutes. On compute capability 9.0 steps with prompts run on its
FlashAttention-3 kernels; elsewhere, and in the decode phase everywhere, on fa2: fa3 splits no request over
multiprocessors and gives each query head a tile of its own, of which one token fills a row.

A replayed graph launches what was captured, so its plan has to be made again before every replay, into the buffers that
the captured kernels read. How decode is split depends on the whole batch: with other neighbours, or in another bucket,
a request's result is the same within rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from breakgraph.attention import flashinfer_plan
from breakgraph.attention.base import DECODE, AttentionBackend, AttentionMetadata, GraphSupport, LayerAttention
from breakgraph.attention.flashinfer_plan import FA3_CAPABILITY, Family, FixedShape, PlanConstants
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep, HostTables
from breakgraph.attention.triton_ops import dense_heads, store_in_bucket

if TYPE_CHECKING:
    from breakgraph.attention.flashinfer_kernels import PlannedKernel


@dataclass(frozen=True)
class FlashInferMetadata(AttentionMetadata):
    kernels: Mapping[PlanConstants, PlannedKernel]
    """Planned for this step, and for no other since."""
    serial: int


class FlashInferAttention(AttentionBackend):
    """Needs the package `flashinfer-python`: raises ImportError on construction where it does not import.

    One plan is in force at a time: planning a step retires the metadata of the step before.
    """

    name: str = "flashinfer"

    def __init__(self, layers: Iterable[LayerAttention]) -> None:
        try:
            from breakgraph.attention import flashinfer_kernels
        except (OSError, RuntimeError) as failure:  # a library that does not load, parts of different versions
            raise ImportError(f"flashinfer: {failure}") from failure

        super().__init__(layers)
        self._module = flashinfer_kernels
        self._constants = {layer_id: flashinfer_plan.constants_of(layer) for layer_id, layer in self.layers.items()}
        self._groups = tuple(dict.fromkeys(self._constants.values()))
        self._kernels: dict[tuple[PlanConstants, Family, FixedShape | None, int, torch.dtype], PlannedKernel] = {}
        self._serials = itertools.count(1)
        self._scratch: tuple[flashinfer_kernels.Scratch, flashinfer_kernels.Scratch] | None = None

    def bind(self, kv: KVCacheBuffers) -> None:
        kv.assert_contiguous()
        super().bind(kv)

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        return flashinfer_plan.refusal(layer, device, dtype)

    def graph_support(self, phase: str) -> GraphSupport:
        """fa2's graph mode keeps room for every tile that the rows could make, 0.7 GB for 8192 tokens of 32 heads: it
        is for decode, and prompts are captured on fa3 alone."""
        if phase == DECODE:
            return "decode"
        device = None if self._kv is None else next(iter(self._kv.key.values())).device
        return "varlen" if _is_hopper(device) else "none"

    def plan(self, step: AttentionStep) -> FlashInferMetadata:
        assert step.q_lens, f"attention 'flashinfer' needs the host lengths of a {step.phase!r} step"
        decode = step.phase == DECODE
        is_fixed = decode or step.fixed_slots
        # Where no graph reads them, the host's tables are enough: nothing else of the requests goes to the device.
        tables: torch.Tensor | HostTables
        if is_fixed or not step.block_tables:
            tables = step.block_tables_gpu
            num_slots, width = tables.shape
        else:
            tables = step.block_tables
            num_slots, width = len(tables), max(map(len, tables))
        fixed = FixedShape(step.padded_num_tokens, num_slots, width) if is_fixed else None
        device = step.slot_mapping_gpu.device
        family: Family = "fa3" if _is_hopper(device) and not decode else "fa2"
        unused = 1 if decode else 0  # a padded decode row attends to one token of the reserved block
        q_lens, seq_lens = (
            flashinfer_plan.fill_slots(lens, num_slots, unused) for lens in (step.q_lens, step.seq_lens)
        )
        if decode:
            step.assert_one_token_a_row()
        layout = flashinfer_plan.lay_out(q_lens, seq_lens, self.kv.block_size, width)
        serial = next(self._serials)
        # Ordinary tensors whatever the caller's mode: inference tensors could not be rewritten outside inference mode.
        with torch.inference_mode(False), torch.cuda.device(device):
            pages = self._module.StepPages.stage(layout, tables, device)
            kernels = {constants: self._kernel(constants, family, fixed, device) for constants in self._groups}
            for kernel in kernels.values():
                kernel.plan(pages, serial)
        return FlashInferMetadata(step, self, kernels, serial)

    def _kernel(
        self, constants: PlanConstants, family: Family, fixed: FixedShape | None, device: torch.device
    ) -> PlannedKernel:
        block_size, dtype = self.kv.block_size, next(iter(self.kv.key.values())).dtype
        key = (constants, family, fixed, block_size, dtype)
        if key not in self._kernels:
            if self._scratch is None:
                scratch = self._module.Scratch
                self._scratch = scratch(device, torch.uint8), scratch(device, torch.int32)
            self._kernels[key] = self._module.PlannedKernel(
                constants, family, dtype, fixed, *self._scratch, block_size, device
            )
        return self._kernels[key]

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention, metadata: AttentionMetadata) -> bool:
        return store_in_bucket(k, v, metadata.step, self.kv, layer)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerAttention,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        stored: bool = False,
    ) -> None:
        assert isinstance(metadata, FlashInferMetadata), f"metadata of another implementation: {metadata}"
        kernel = metadata.kernels[self._constants[layer.layer_id]]
        step, live, rows = metadata.step, metadata.step.num_tokens, metadata.step.padded_num_tokens
        if kernel.serial != metadata.serial:
            raise RuntimeError(
                "this step's FlashInfer plan was replaced by that of a later step; call plan(step) again"
            )
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and (kernel.fixed is None or (live < rows and step.phase != DECODE)):
            raise RuntimeError(
                f"a graph of the {step.phase!r} phase can hold FlashInfer's kernels for fixed request slots, captured "
                f"with every row live; got {live} live rows of {rows}, fixed_slots={step.fixed_slots}"
            )
        sinks = None if layer.sinks is None else layer.sinks.float()
        starts = None
        if step.phase == DECODE:
            live = rows
        elif step.fixed_slots:
            # Which rows a graph leaves is the replay's matter, so all of them become zero first.
            starts = step.cu_seqlens_q_gpu
            out.zero_()
        elif live < rows:
            out[live:].zero_()
        key_cache, value_cache = self.kv.key[layer.layer_id], self.kv.value[layer.layer_id]
        if live < rows:
            q, out = q[:live], out[:live]
        if stored and kernel.fixed is None:
            kernel.run(dense_heads(q), key_cache, value_cache, sinks, out)
            return
        attend = self._module.attend_paged if kernel.fixed is None else self._module.recorded_attention
        attend(
            dense_heads(q), dense_heads(k[:live]), dense_heads(v[:live]), step.slot_mapping_gpu[:live], starts,
            key_cache, value_cache, sinks, kernel.buffers, kernel.handle, out, stored,
        )  # fmt: skip


@functools.cache
def _is_hopper(device: torch.device | None) -> bool:
    return torch.cuda.get_device_capability(device) == FA3_CAPABILITY

"""Our own paged attention on CUDA: prompts, mixed batches and decode, straight from the block table.

All lengths are read on the device, so a full graph may hold it in every phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import triton

from breakgraph.attention.base import (
    DECODE,
    AttentionBackend,
    AttentionMetadata,
    BoundAttention,
    GraphSupport,
    LayerAttention,
)
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.refusals import capability_refusal, device_refusal, dtype_refusal
from breakgraph.attention.step import AttentionStep
from breakgraph.attention.triton_ops import VarlenCall, dense_heads, paged_attention, store_in_bucket
from breakgraph.errors import ConfigError

MAX_HEAD_DIM = 256
MAX_GROUP = 128
MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonAttention(AttentionBackend):
    """Kernels of our own.

    Args:
        short: whether requests are taken to be short. Settled here, as the bits of a request must not depend on how
            long others in its step are.
    """

    name: str = "triton"

    def __init__(self, layers: Iterable[LayerAttention], *, short: bool = False) -> None:
        super().__init__(layers)
        self.is_short = short

    def bind(self, kv: KVCacheBuffers) -> None:
        """Raises ConfigError for a block size that is not a power of two."""
        refused = self.block_size_refusal(kv.block_size)
        if refused is not None:
            raise ConfigError(f"attention 'triton': {refused}; change block_size, or use attention='sdpa'")
        kv.assert_contiguous()
        super().bind(kv)

    @classmethod
    def block_size_refusal(cls, block_size: int) -> str | None:
        return f"its block size is a power of two, not {block_size}" if block_size & (block_size - 1) else None

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        elsewhere = None if triton.knobs.runtime.interpret else device_refusal(device)
        if refused := elsewhere or dtype_refusal(dtype, _DTYPES):
            return refused
        if max(layer.head_dim, layer.v_head_dim) > MAX_HEAD_DIM:
            return f"its head sizes go up to {MAX_HEAD_DIM}, not {max(layer.head_dim, layer.v_head_dim)}"
        group, rest = divmod(layer.num_heads, layer.num_kv_heads)
        if rest or group > MAX_GROUP:
            return (
                f"each of its key heads serves the same number of query heads, at most {MAX_GROUP}, "
                f"not {layer.num_heads} for {layer.num_kv_heads}"
            )
        if layer.scale <= 0:
            return f"its scale is positive, not {layer.scale}"
        return capability_refusal(device, MIN_CAPABILITY) if device.type == "cuda" else None

    def graph_support(self, phase: str) -> GraphSupport:
        return "decode" if phase == DECODE else "varlen"

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        if step.phase == DECODE:
            step.assert_one_token_a_row()
        else:
            requests = step.requests()
            starts = requests.cu_seqlens_q
            assert starts is not None, f"attention 'triton' needs cu_seqlens_q_gpu in {step.phase!r}"
            reqs = (len(requests.block_tables), len(requests.seq_lens), len(starts) - 1)
            assert reqs[0] == reqs[1] == reqs[2], f"block_tables, seq_lens and cu_seqlens_q of {reqs} requests"
            dtypes = {requests.block_tables.dtype, requests.seq_lens.dtype, starts.dtype}
            assert dtypes == {torch.int32}, f"block_tables, seq_lens and cu_seqlens_q are int32, not {dtypes}"
        return AttentionMetadata(step, self)

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
        step, kv = metadata.step, self.kv
        assert out.stride(-1) == 1, f"the columns of out are {out.stride(-1)} apart"
        requests = step.requests()
        caches = kv.key[layer.layer_id], kv.value[layer.layer_id]
        paged_attention(
            dense_heads(q), dense_heads(k), dense_heads(v), step.slot_mapping_gpu, *caches, requests.block_tables,
            requests.seq_lens, None if step.phase == DECODE else requests.cu_seqlens_q,
            layer.sinks, layer.scale, layer.softcap, layer.window, out, stored, self.is_short,
        )  # fmt: skip

    def bound(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerAttention,
        out: torch.Tensor,
        stored: bool = False,
    ) -> BoundAttention:
        # A plain launch is enough: nobody records a break. The emulated device sees the writes of operators only.
        is_launch = stored and q.is_cuda and q.shape[0] > 0 and q.stride(-1) == 1 and out.stride(-1) == 1
        if not is_launch or type(self).forward is not TritonAttention.forward:
            return super().bound(q, k, v, layer, out, stored)
        kv = self.kv

        def make() -> VarlenCall:
            caches = kv.key[layer.layer_id], kv.value[layer.layer_id]
            return VarlenCall(q, *caches, layer.sinks, layer.scale, layer.softcap, layer.window, out, self.is_short)

        call = make()

        def run(metadata: AttentionMetadata) -> None:
            nonlocal kv, call
            if kv is not self.kv:
                kv = self.kv
                call = make()
            requests = metadata.step.requests()
            assert requests.cu_seqlens_q is not None, "a decode step stores its keys itself"
            # Triton launches on the current device, whatever its arguments.
            is_elsewhere = q.device.index != torch.cuda.current_device()
            with torch.cuda.device(q.device) if is_elsewhere else nullcontext():
                call(requests.block_tables, requests.seq_lens, requests.cu_seqlens_q)

        return run

"""FlashAttention through torch's own operator: prefill and mixed batches on CUDA in half precision.

The operator takes packed sequences. Cached prefixes are gathered from the paged cache into one packed tensor first;
a batch without prefixes is passed as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from breakgraph.attention.base import AttentionBackend, AttentionMetadata, GraphSupport, LayerAttention
from breakgraph.attention.refusals import capability_refusal, device_refusal, dtype_refusal, value_size_refusal
from breakgraph.attention.step import AttentionStep
from breakgraph.errors import ConfigError

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashMetadata(AttentionMetadata):
    cu_seqlens_q: torch.Tensor
    """[R + 1] int32."""
    cu_seqlens_k: torch.Tensor
    """[R + 1] int32."""
    max_seqlen_q: int
    max_seqlen_k: int
    kv_slots: torch.Tensor | None
    """[sum of seq_lens] int64, the cache slot of every key in packed order; None when no request has a prefix."""


class FlashAttention(AttentionBackend):
    name: str = "flash"

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        if refused := device_refusal(device) or dtype_refusal(dtype, _DTYPES):
            return refused
        if layer.sinks is not None:
            return "it has no attention sinks"
        if layer.softcap is not None:
            return "it has no softcap"
        if refused := value_size_refusal(layer):
            return refused
        if layer.head_dim > MAX_HEAD_DIM or layer.head_dim % 8:
            return f"its head sizes are multiples of 8 up to {MAX_HEAD_DIM}, not {layer.head_dim}"
        return capability_refusal(device, MIN_CAPABILITY)

    def graph_support(self, phase: str) -> GraphSupport:
        return "none"

    @cached_property
    def _operator(self) -> FlashOperator:
        return FlashOperator(torch.ops.aten._flash_attention_forward.default)

    def plan(self, step: AttentionStep) -> FlashMetadata:
        num_reqs = len(step.q_lens)
        assert num_reqs, f"attention 'flash' needs the host lengths of a {step.phase!r} step"
        seq_lens = step.seq_lens_gpu[:num_reqs]
        cu_seqlens_q = step.cu_seqlens_q_gpu
        if cu_seqlens_q is None:  # a decode step: one new token a request
            cu_seqlens_q = torch.arange(num_reqs + 1, dtype=torch.int32, device=seq_lens.device)
        cu_seqlens_k = torch.zeros(num_reqs + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        return FlashMetadata(
            step=step,
            backend=self,
            cu_seqlens_q=cu_seqlens_q[: num_reqs + 1],
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max(step.q_lens),
            max_seqlen_k=max(step.seq_lens),
            kv_slots=None if step.q_lens == step.seq_lens else self._kv_slots(step, cu_seqlens_k),
        )

    def _kv_slots(self, step: AttentionStep, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
        num_reqs, num_keys = len(step.seq_lens), sum(step.seq_lens)
        device = cu_seqlens_k.device
        # The size is given, as repeat_interleave would otherwise read the lengths back from the device.
        request = torch.arange(num_reqs, device=device).repeat_interleave(
            step.seq_lens_gpu[:num_reqs], output_size=num_keys
        )
        position = torch.arange(num_keys, device=device) - cu_seqlens_k[request]
        block_size = self.kv.block_size
        block = step.block_tables_gpu[request, position // block_size]
        return block.long() * block_size + position % block_size

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
        assert not stored, f"attention {self.name!r} writes the cache itself"
        assert isinstance(metadata, FlashMetadata), f"metadata of another implementation: {type(metadata).__name__}"
        step = metadata.step
        live = step.num_tokens
        keys, values = k[:live], v[:live]
        self.kv.write(layer.layer_id, step.slot_mapping_gpu[:live], keys, values)
        if metadata.kv_slots is not None:
            keys, values = self.kv.read_slots(layer.layer_id, metadata.kv_slots)
        out[:live] = self._operator(
            query=q[:live],
            key=keys,
            value=values,
            cum_seq_q=metadata.cu_seqlens_q,
            cum_seq_k=metadata.cu_seqlens_k,
            max_q=metadata.max_seqlen_q,
            max_k=metadata.max_seqlen_k,
            scale=layer.scale,
            window=layer.window,
        )
        if live < step.padded_num_tokens:
            out[live:].zero_()


class FlashOperator:
    """`aten::_flash_attention_forward`, whose arguments changed between torch releases, under one causal signature.

    Arguments go by name. One that this torch does not have is left out only where its absence means the same.

    Raises ConfigError on construction when the operator asks for something that is not known here.
    """

    _NEEDED = frozenset({"query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale"})
    _WINDOW = frozenset({"window_size_left", "window_size_right"})
    _FIXED: ClassVar[dict[str, Any]] = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False}

    def __init__(self, operator: Any) -> None:
        arguments = {argument.name: argument for argument in operator._schema.arguments}
        missing = sorted(self._NEEDED - arguments.keys())
        known = self._NEEDED | self._WINDOW | self._FIXED.keys()
        unknown = sorted(
            name for name, argument in arguments.items() if not argument.has_default_value() and name not in known
        )
        if missing or unknown:
            raise ConfigError(
                f"torch {torch.__version__} has a FlashAttention operator that this version does not know (missing "
                f"{missing}, new {unknown}): {operator._schema}; use attention='sdpa'"
            )
        self._call: Callable[..., Any] = operator
        self._has_window = arguments.keys() >= self._WINDOW
        self._fixed = {name: value for name, value in self._FIXED.items() if name in arguments}

    def bind(self, window: int | None, **values: Any) -> dict[str, Any]:
        """The operator's keyword arguments for one call."""
        bound = {**self._fixed, **values}
        if window is not None:
            if not self._has_window:
                raise ConfigError(
                    f"the FlashAttention operator of torch {torch.__version__} has no window; use attention='sdpa'"
                )
            bound |= {"window_size_left": window - 1, "window_size_right": 0}
        return bound

    def __call__(self, *, window: int | None, **values: Any) -> torch.Tensor:
        output: torch.Tensor = self._call(**self.bind(window, **values))[0]
        return output

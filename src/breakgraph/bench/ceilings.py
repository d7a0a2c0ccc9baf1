"""What the machine can do at most, and what a step needs of it at least.

The roofline model: S. Williams, A. Waterman, D. Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from breakgraph.bench.result import Metric, Row
from breakgraph.bench.timing import gpu_ms
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.attention import LayerAttention
    from breakgraph.models import HFModel

_COPY_GIB = (1, 2, 4)
_MATRIX_SIZES = (4096, 8192)
_LAUNCHES = 1000
"""That the host can be ahead of the device without waiting for it."""
_LAUNCH_ROUNDS = 10
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device and its host."""

    copy_gb_per_sec: float
    """That a copy reads and writes together."""
    matrix_tflop_per_sec: float
    launch_us: float
    """Of the host, for an eager operator on a tensor of eight numbers."""
    dtype: torch.dtype

    def floor_ms(self, work: Work) -> float:
        """The roofline: neither the bytes nor the operations can be done in less."""
        return max(self.bytes_ms(work), work.flops / self.matrix_tflop_per_sec / 1e9)

    def bytes_ms(self, work: Work) -> float:
        """Time for the bytes alone."""
        return work.num_bytes / self.copy_gb_per_sec / 1e6

    def rows(self) -> list[Row]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            Row(name="ceiling", params={"what": "copy"},
                metrics={"rate": Metric(value=self.copy_gb_per_sec, unit="GB/s")}),
            Row(name="ceiling", params={"what": f"{dtype} matrix product"},
                metrics={"rate": Metric(value=self.matrix_tflop_per_sec, unit="TFLOP/s")}),
            Row(name="ceiling", params={"what": "eager operator, host"},
                metrics={"time": Metric(value=self.launch_us, unit="us")}),
        ]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a step cannot do without: floating point operations, and bytes read from weights and KV cache."""

    flops: float
    num_bytes: float


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copies of 1 to 4 GiB, square products of random values, and additions in place; the best of each. Takes up to 8
    GiB.

    Raises:
        ConfigError: the smallest copy takes more than half of the memory that is free.
    """
    copies, products = [], []
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if 2 * (_COPY_GIB[0] << 30) > free // 2:
        raise ConfigError(
            f"ceilings are measured with at least {4 * _COPY_GIB[0]} GiB free on {device}, {free / 2**30:.1f} GiB are; "
            "stop what else runs there"
        )
    for gib in _COPY_GIB:
        if 2 * (gib << 30) > free // 2:
            continue
        source = torch.empty(gib << 29, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        copies.append(2 * source.nbytes / gpu_ms(lambda s=source, t=target: t.copy_(s), device) / 1e6)  # type: ignore[misc]
        del source, target
    for size in _MATRIX_SIZES:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        ms = gpu_ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)  # type: ignore[misc]
        products.append(2 * size**3 / ms / 1e9)
    torch.cuda.empty_cache()
    return Ceilings(max(copies), max(products), _launch_us(device), dtype)


def _launch_us(device: torch.device) -> float:
    counter = torch.zeros(8, device=device)
    seconds = []
    for _ in range(_LAUNCH_ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            counter.add_(1)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / _LAUNCHES * 1e6


def step_work(model: HFModel, q_lens: Sequence[int], seq_lens: Sequence[int]) -> Work:
    """Of one packed step that gives logits of each request's last token.

    Every weight is read once, of the experts the share that random routing reaches (1 - (1 - k/E)^T). Activations are
    not counted: they may stay in caches.
    """
    num_tokens, num_reqs = sum(q_lens), len(q_lens)
    config = model.config.get_text_config(decoder=True)
    num_experts = next((getattr(config, name) for name in _NUM_EXPERTS if getattr(config, name, None)), 0)
    share = getattr(config, "num_experts_per_tok", 0) / num_experts if num_experts else 0.0
    embedding, head = model.module.get_input_embeddings().weight, model.module.get_output_embeddings().weight
    flops = 2.0 * num_reqs * head.numel()
    num_bytes = float(head.nbytes + num_tokens * embedding.shape[-1] * embedding.element_size())
    for weight in model.module.parameters():
        if weight is embedding or weight is head:
            continue
        if weight.dim() == 3 and weight.shape[0] == num_experts:
            flops += 2.0 * num_tokens * share * weight.numel()
            num_bytes += weight.nbytes * (1 - (1 - share) ** num_tokens)
        else:
            flops += 2.0 * num_tokens * weight.numel() * (weight.dim() == 2)
            num_bytes += weight.nbytes
    for layer in model.layers:
        pairs, read = _attention_pairs(layer, q_lens, seq_lens)
        flops += 2.0 * layer.num_heads * (layer.head_dim + layer.v_head_dim) * pairs
        num_bytes += layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * read * model.dtype.itemsize
    return Work(flops, num_bytes)


def _attention_pairs(layer: LayerAttention, q_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[int, int]:
    """Pairs of a query and a key that it sees, and keys that are read, over all requests."""
    pairs = read = 0
    for q_len, seq_len in zip(q_lens, seq_lens, strict=True):
        window = seq_len if layer.window is None else min(layer.window, seq_len)
        first = seq_len - q_len
        # Queries before `window` see all that is before them, the others `window` keys.
        short = max(0, window - first)
        pairs += short * first + short * (short + 1) // 2 + (q_len - short) * window
        read += min(seq_len, window + q_len - 1)
    return pairs, read

# mypy: allow-untyped-defs, allow-incomplete-defs
"""Normalised heads, turned by their positions, in one kernel: what Qwen3 does to queries and keys.

Imported only where models are compiled: triton is not on every machine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Of one program."""


@triton.jit
def _norm_rope_kernel(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, num_rows, token_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token. Grid: (ceil(num_rows / BLOCK),)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    columns = tl.arange(0, HALF)
    mask = (rows < num_rows)[:, None]
    first = x_ptr + (tokens * token_stride + (rows % NUM_HEADS) * head_stride)[:, None] + columns[None, :]
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    x1 = x1 * scale * tl.load(weight_ptr + columns).to(tl.float32)[None, :]
    x2 = x2 * scale * tl.load(weight_ptr + HALF + columns).to(tl.float32)[None, :]
    angles = (tokens * (2 * HALF))[:, None] + columns[None, :]
    cos1 = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + (rows.to(tl.int64) * (2 * HALF))[:, None] + columns[None, :]
    tl.store(out, x1 * cos1 - x2 * sin1, mask=mask)
    tl.store(out + HALF, x2 * cos2 + x1 * sin2, mask=mask)


def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape[1:]
    x, weight, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight, cos, sin))
    out = x.new_empty(x.shape)
    num_rows = num_tokens * num_heads
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _norm_rope_kernel[(triton.cdiv(num_rows, _HEADS),)](
            out, x, weight, cos, sin, num_rows, x.stride(1), x.stride(2), eps,
            NUM_HEADS=num_heads, HALF=head_dim // 2, BLOCK=_HEADS, num_warps=4,
        )  # fmt: skip
    return out


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define("norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor")
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("norm_rope", _norm_rope, _key)
_LIBRARY.impl("norm_rope", lambda x, *_: x.new_empty(x.shape), "Meta")

norm_rope: Any = torch.ops.breakgraph.norm_rope.default
"""x [1, T, heads, D] with any strides, weight [D], cos and sin [1, 1, T, D] to a dense [1, T, heads, D].

Each head divided by its root mean square (Zhang and Sennrich, 2019, with `eps` under the root) and multiplied with
`weight`, then its halves rotated against each other (rotary embedding of Su et al., 2021, in the order of GPT-NeoX).
D is a power of two, 2 at least. Sums and products in float32, rounded once.
"""

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
def _turn(
    out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, program, num_rows, token_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows, each a head of a token."""
    rows = program * BLOCK + tl.arange(0, BLOCK)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    columns = tl.arange(0, HALF)
    mask = (rows < num_rows)[:, None]
    first = x_ptr + (tokens * token_stride + (rows % NUM_HEADS) * head_stride)[:, None] + columns[None, :]
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    angles = (tokens * (2 * HALF))[:, None] + columns[None, :]
    cos1 = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    x1 = x1 * scale * tl.load(weight_ptr + columns).to(tl.float32)[None, :]
    x2 = x2 * scale * tl.load(weight_ptr + HALF + columns).to(tl.float32)[None, :]
    out = out_ptr + (rows.to(tl.int64) * (2 * HALF))[:, None] + columns[None, :]
    tl.store(out, x1 * cos1 - x2 * sin1, mask=mask)
    tl.store(out + HALF, x2 * cos2 + x1 * sin2, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_others", "num_programs"])
def _norm_rope_kernel(
    out_ptr, x_ptr, weight_ptr, num_rows, token_stride, head_stride, eps,
    other_out_ptr, other_ptr, other_weight_ptr, num_others, other_token_stride, other_head_stride, other_eps,
    cos_ptr, sin_ptr, num_programs,
    NUM_HEADS: tl.constexpr, OTHER_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_programs = ceil(num_rows / BLOCK) for x, and as many again as the others' rows need,)."""
    program = tl.program_id(0)
    if program < num_programs:
        _turn(
            out_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, program, num_rows, token_stride, head_stride, eps,
            NUM_HEADS, HALF, BLOCK,
        )  # fmt: skip
    else:
        _turn(
            other_out_ptr, other_ptr, other_weight_ptr, cos_ptr, sin_ptr, program - num_programs, num_others,
            other_token_stride, other_head_stride, other_eps, OTHER_HEADS, HALF, BLOCK,
        )  # fmt: skip


def _norm_rope_pair(
    x: Tensor, weight: Tensor, eps: float, other: Tensor, other_weight: Tensor, other_eps: float,
    cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_tokens, num_heads, head_dim = x.shape[1:]
    other_heads = other.shape[2]
    x, weight, other, other_weight, cos, sin = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight, other, other_weight, cos, sin)
    )
    out, other_out = x.new_empty(x.shape), other.new_empty(other.shape)
    num_rows, num_others = num_tokens * num_heads, num_tokens * other_heads
    programs = triton.cdiv(num_rows, _HEADS)
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _norm_rope_kernel[(programs + triton.cdiv(num_others, _HEADS),)](
            out, x, weight, num_rows, x.stride(1), x.stride(2), eps,
            other_out, other, other_weight, num_others, other.stride(1), other.stride(2), other_eps,
            cos, sin, programs, NUM_HEADS=num_heads, OTHER_HEADS=max(1, other_heads), HALF=head_dim // 2, BLOCK=_HEADS,
            num_warps=4,
        )  # fmt: skip
    return out, other_out


def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return _norm_rope_pair(x, weight, eps, x[:, :, :0], weight, eps, cos, sin)[0]


def _empty_pair(x: Tensor, weight: Tensor, eps: float, other: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), other.new_empty(other.shape)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define("norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor")
_LIBRARY.define(
    "norm_rope_pair(Tensor x, Tensor weight, float eps, Tensor other, Tensor other_weight, float other_eps, "
    "Tensor cos, Tensor sin) -> (Tensor, Tensor)"
)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("norm_rope", _norm_rope, _key)
    _LIBRARY.impl("norm_rope_pair", _norm_rope_pair, _key)
_LIBRARY.impl("norm_rope", lambda x, *_: x.new_empty(x.shape), "Meta")
_LIBRARY.impl("norm_rope_pair", _empty_pair, "Meta")

norm_rope: Any = torch.ops.breakgraph.norm_rope.default
"""x [1, T, heads, D] with any strides, weight [D], cos and sin [1, 1, T, D] to a dense [1, T, heads, D].

Each head divided by its root mean square (Zhang and Sennrich, 2019, with `eps` under the root) and multiplied with
`weight`, then its halves rotated against each other (rotary embedding of Su et al., 2021, in the order of GPT-NeoX).
D is a power of two, 2 at least. Sums and products in float32, rounded once.
"""

norm_rope_pair: Any = torch.ops.breakgraph.norm_rope_pair.default
"""The same of two, x and other [1, T, other heads, D], with the same angles and weights of their own, in one kernel."""

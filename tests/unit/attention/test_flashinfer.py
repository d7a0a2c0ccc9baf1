"""What FlashInfer is told about a step, and what it refuses: no GPU and no package needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from breakgraph.attention import LayerAttention
from breakgraph.attention.flashinfer import FlashInferAttention
from breakgraph.attention.flashinfer_plan import (
    FixedShape,
    constants_of,
    fill_slots,
    float_workspace_bytes,
    int_workspace_bytes,
    lay_out,
)
from unit.attention.ragged import PLAIN, SINKS

CUDA = torch.device("cuda")
WIDE = replace(PLAIN, head_dim=128, v_head_dim=128)


@pytest.mark.parametrize(
    ("layer", "device", "dtype", "reason"),
    [
        (WIDE, torch.device("cpu"), torch.bfloat16, "it runs on CUDA, not on cpu"),
        (WIDE, CUDA, torch.float32, "it computes in float16 or bfloat16, not in float32"),
        (replace(WIDE, v_head_dim=64), CUDA, torch.bfloat16, "not 64 beside 128"),
        (replace(WIDE, head_dim=96, v_head_dim=96), CUDA, torch.bfloat16, "its head sizes are 64, 128, 256, not 96"),
        (replace(WIDE, num_heads=5), CUDA, torch.bfloat16, "same number of query heads, not 5 for 2"),
        (replace(WIDE, sinks=SINKS, softcap=2.0), CUDA, torch.bfloat16, "it has no softcap beside attention sinks"),
        (WIDE, CUDA, torch.bfloat16, "it needs compute capability 8.0, not 7.5"),
    ],
)
def test_refusals(
    layer: LayerAttention, device: torch.device, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (7, 5)))
    assert reason in (FlashInferAttention.refusal(layer, device, dtype) or "")


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (8, 0)))
    for layer in (WIDE, replace(WIDE, window=5, softcap=2.0), replace(WIDE, window=5, sinks=SINKS)):
        for dtype in (torch.bfloat16, torch.float16):
            assert FlashInferAttention.refusal(layer, CUDA, dtype) is None


def test_layers_share_a_plan_if_nothing_that_it_is_made_of_differs() -> None:
    same = (WIDE, replace(WIDE, layer_id=7), replace(WIDE, layer_id=8))
    other = [
        replace(WIDE, window=5), replace(WIDE, window=6), replace(WIDE, softcap=2.0), replace(WIDE, scale=0.5),
        replace(WIDE, sinks=SINKS), replace(WIDE, num_heads=2), replace(WIDE, num_kv_heads=1),
        replace(WIDE, head_dim=64, v_head_dim=64),
    ]  # fmt: skip
    assert len({constants_of(layer) for layer in same}) == 1
    assert len({constants_of(layer) for layer in (*same, *other)}) == 1 + len(other)
    # Whose sinks they are does not matter: they are an argument of the kernel.
    assert constants_of(replace(WIDE, sinks=SINKS)) == constants_of(replace(WIDE, sinks=SINKS + 1))


def test_a_window_counts_the_query_itself() -> None:
    assert [constants_of(replace(WIDE, window=window)).window_left for window in (None, 1, 5)] == [-1, 0, 4]


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=6), st.sampled_from([1, 3, 4, 16])
)
def test_pages_and_lengths_say_where_every_token_is(lens: list[tuple[int, int]], block_size: int) -> None:
    q_lens = [new for new, _ in lens]
    seq_lens = [new + cached if new else 0 for new, cached in lens]
    width = max(-(-total // block_size) for total in seq_lens) + 2
    table = np.arange(len(lens) * width).reshape(len(lens), width) + 1000
    layout = lay_out(q_lens, seq_lens, block_size, width)
    pages = table.flatten()[layout.page_positions]
    assert layout.num_pages == len(pages) == layout.kv_indptr[-1]
    for rows in (table, table.tolist()):
        assert layout.pages_of(rows).tolist() == pages.tolist()
        assert layout.pages_of(rows).dtype == np.int32
    for request, (new, total) in enumerate(zip(q_lens, seq_lens, strict=True)):
        mine = pages[layout.kv_indptr[request] : layout.kv_indptr[request + 1]]
        assert mine.tolist() == table[request, : len(mine)].tolist()
        assert total == (len(mine) - 1) * block_size + layout.last_page_len[request] if len(mine) else total == 0
        assert 0 <= layout.last_page_len[request] <= block_size
        assert layout.qo_indptr[request + 1] - layout.qo_indptr[request] == new
    assert layout.seq_lens.tolist() == seq_lens
    assert layout.max_q_len == max(q_lens)
    arrays = (layout.qo_indptr, layout.kv_indptr, layout.last_page_len, layout.seq_lens, layout.page_positions)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_a_table_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 pages in a block table of 2"):
        lay_out([1], [9], 4, 2)


def test_unused_slots_stand_behind_the_live_ones() -> None:
    assert fill_slots((3, 4), 4, 0) == (3, 4, 0, 0)
    assert fill_slots((1,), 3, 1) == (1, 1, 1)
    with pytest.raises(AssertionError, match="3 requests in 2 slots"):
        fill_slots((1, 1, 1), 2, 1)


def test_the_workspace_of_a_decode_bucket_grows_with_it() -> None:
    constants = constants_of(replace(WIDE, num_heads=32, num_kv_heads=8))
    shapes = [FixedShape(rows, rows, 64) for rows in (1, 8, 64, 256, 1024)]
    for size in (float_workspace_bytes, int_workspace_bytes):
        sizes = [size(constants, "fa2", shape, 132) for shape in shapes]
        assert sizes == sorted(sizes)
    # 256 rows make 319 tiles of 16 at most: queries of 4 heads fill a quarter of one each.
    assert float_workspace_bytes(constants, "fa2", shapes[3], 132) >= 32 * 319 * 16 * 129 * 4
    assert int_workspace_bytes(constants, "fa2", shapes[3], 132) >= 319 * 13 + 4 * (2 * 256 + 2)


def test_prompts_on_fa3_need_lists_of_tiles_and_no_partial_results() -> None:
    constants = constants_of(replace(WIDE, num_heads=32, num_kv_heads=8))
    shape = FixedShape(8192, 64, 512)
    assert float_workspace_bytes(constants, "fa3", shape, 132) == 1 << 20
    works = 8192 // 128 + 63
    assert int_workspace_bytes(constants, "fa3", shape, 132) >= 7 * 4 * works * 32
    assert shape.max_pages == 64 * 512

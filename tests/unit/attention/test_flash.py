"""The FlashAttention adapter on a CPU: what it refuses, how it binds the operator, what it hands over.

A plain stand-in takes the operator's place; its own numbers are compared in tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from breakgraph.attention import LayerAttention
from breakgraph.attention.flash import FlashAttention, FlashOperator
from breakgraph.errors import ConfigError
from unit.attention.ragged import LAYERS, PLAIN, SINKS, ragged_batch, reference, with_changes

CUDA = torch.device("cuda", 0)

_POSITIONAL = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask"
)
_RESULT = "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
_WINDOW = "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
SCHEMAS = {
    "2.11": f"{_POSITIONAL}, *, {_WINDOW}, Tensor? seqused_k=None, Tensor? alibi_slopes=None",
    "2.13": f"{_POSITIONAL}, *, {_WINDOW}, Tensor? seqused_k=None, Tensor? alibi_slopes=None, "
    "Tensor? block_table=None, int? num_splits=None",
    "another order": "Tensor value, Tensor key, Tensor query, Tensor? cum_seq_k, Tensor? cum_seq_q, SymInt max_k, "
    f"SymInt max_q, bool is_causal, {_WINDOW}",
}


class StandInOperator:
    """Computes what the operator promises, from its keyword arguments alone, and remembers them."""

    def __init__(self, arguments: str) -> None:
        self._schema = torch._C.parse_schema(f"test::flash({arguments}) -> {_RESULT}")
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> tuple[torch.Tensor, ...]:
        declared = {argument.name for argument in self._schema.arguments}
        required = {a.name for a in self._schema.arguments if not a.has_default_value()}
        assert required <= given.keys() <= declared
        assert given["is_causal"]
        assert given.get("dropout_p", 0.0) == 0.0
        self.calls.append(given)
        lens_q, lens_k = (given[name].diff().tolist() for name in ("cum_seq_q", "cum_seq_k"))
        assert (max(lens_q), max(lens_k)) == (given["max_q"], given["max_k"])
        left = given.get("window_size_left")
        heads, kv_heads, size = given["query"].shape[1], given["key"].shape[1], given["query"].shape[2]
        layer = LayerAttention(0, heads, kv_heads, size, size, given["scale"], None if left is None else left + 1)
        rows = zip(given["query"].split(lens_q), given["key"].split(lens_k), given["value"].split(lens_k), strict=True)
        out = torch.cat([reference(q.double(), k.double(), v.double(), layer) for q, k, v in rows])
        return (out.to(given["query"].dtype), *[torch.empty(0)] * 4)


def flash_with(operator: StandInOperator, layer: LayerAttention) -> FlashAttention:
    attention = FlashAttention([layer])
    attention.__dict__["_operator"] = FlashOperator(operator)
    return attention


@pytest.mark.parametrize("arguments", SCHEMAS.values(), ids=SCHEMAS.keys())
@pytest.mark.parametrize("layer", ["plain", "one key head", "window"])
def test_batches_with_prefixes_and_padding(arguments: str, layer: str) -> None:
    operator = StandInOperator(arguments)
    batch = ragged_batch(LAYERS[layer], q_lens=[9, 1, 4], cached_lens=[0, 17, 8], padding=3)
    out = batch.run(flash_with(operator, batch.layer))
    torch.testing.assert_close(out[: batch.live].double(), batch.expected(), rtol=0, atol=1e-5)
    assert out[batch.live :].eq(0).all()
    assert len(operator.calls) == 1


def test_a_batch_without_prefixes_is_not_gathered() -> None:
    operator = StandInOperator(SCHEMAS["2.13"])
    batch = ragged_batch(PLAIN, q_lens=[9, 4], cached_lens=[0, 0], padding=2)
    batch.run(flash_with(operator, PLAIN))
    assert operator.calls[0]["key"].data_ptr() == batch.k.data_ptr()
    assert operator.calls[0]["key"].shape[0] == 13
    # The cache has them all the same.
    keys, _ = batch.kv.read_slots(0, batch.step.slot_mapping_gpu[:13])
    assert torch.equal(keys, batch.k[:13])


def test_device_rows_beyond_the_live_requests_are_ignored() -> None:
    batch = ragged_batch(PLAIN, q_lens=[3, 2], cached_lens=[4, 0])
    step = batch.step
    batch.step = with_changes(
        step,
        cu_seqlens_q_gpu=torch.cat([step.cu_seqlens_q_gpu, step.cu_seqlens_q_gpu[-1:]]),
        seq_lens_gpu=torch.cat([step.seq_lens_gpu, step.seq_lens_gpu.new_tensor([99])]),
        block_tables_gpu=torch.cat([step.block_tables_gpu, step.block_tables_gpu[:1]]),
    )
    out = batch.run(flash_with(StandInOperator(SCHEMAS["2.13"]), PLAIN))
    torch.testing.assert_close(out.double(), batch.expected(), rtol=0, atol=1e-5)


def test_the_operator_of_this_torch_is_understood() -> None:
    operator = FlashOperator(torch.ops.aten._flash_attention_forward.default)
    tensors = dict.fromkeys(("query", "key", "value", "cum_seq_q", "cum_seq_k"), torch.empty(0))
    bound = operator.bind(5, **tensors, max_q=1, max_k=2, scale=0.5)
    declared = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert bound.keys() <= set(declared)
    assert (bound["window_size_left"], bound["window_size_right"], bound["is_causal"]) == (4, 0, True)
    assert not operator.bind(None, **tensors).keys() & {"window_size_left", "window_size_right"}


def test_an_operator_that_wants_something_new_is_refused_by_name() -> None:
    changed = SCHEMAS["2.13"].replace("bool is_causal,", "bool is_causal, Tensor page_map,").replace("max_k", "longest")
    with pytest.raises(ConfigError, match=r"missing \['max_k'\], new \['longest', 'page_map'\].*attention='sdpa'"):
        FlashOperator(StandInOperator(changed))


def test_a_window_that_the_operator_lacks_is_an_error_not_a_wrong_answer() -> None:
    operator = FlashOperator(StandInOperator(f"{_POSITIONAL}, *, float? scale=None"))
    assert operator.bind(None, max_q=1)["max_q"] == 1
    with pytest.raises(ConfigError, match="has no window"):
        operator.bind(5, max_q=1)


@pytest.mark.parametrize(
    ("layer", "device", "dtype", "reason"),
    [
        (PLAIN, torch.device("cpu"), torch.bfloat16, "on CUDA, not on cpu"),
        (PLAIN, CUDA, torch.float32, "float16 or bfloat16, not in float32"),
        (replace(PLAIN, sinks=SINKS), CUDA, torch.bfloat16, "sinks"),
        (replace(PLAIN, softcap=2.0), CUDA, torch.bfloat16, "softcap"),
        (replace(PLAIN, v_head_dim=12), CUDA, torch.bfloat16, "not 12 beside 16"),
        (replace(PLAIN, head_dim=320, v_head_dim=320), CUDA, torch.bfloat16, "up to 256, not 320"),
        (replace(PLAIN, head_dim=20, v_head_dim=20), CUDA, torch.bfloat16, "multiples of 8 up to 256, not 20"),
        (PLAIN, CUDA, torch.bfloat16, "capability 8.0, not 7.5"),
    ],
)
def test_refusals(
    layer: LayerAttention, device: torch.device, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (7, 5)))
    assert reason in (FlashAttention.refusal(layer, device, dtype) or "")


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(get_device_capability=lambda device: (8, 0)))
    for layer in (PLAIN, LAYERS["window"], replace(PLAIN, head_dim=256, v_head_dim=256)):
        assert FlashAttention.refusal(layer, CUDA, torch.bfloat16) is None


def test_no_full_graph_may_hold_it() -> None:
    assert {FlashAttention([PLAIN]).graph_support(phase) for phase in ("prefill", "decode")} == {"none"}

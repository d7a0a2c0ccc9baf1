"""Experts that leave out padding: what a bucket adds to a step costs its dense layers, and no expert.

`transformers` computes all rows. Here the rows behind the live ones are routed to an expert that does not exist. Our
Triton kernels skip it; so does the grouped matrix multiplication of `transformers`, which takes every kind of experts:
such rows lie behind the last group and come out as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from breakgraph.attention import live_token_count
from breakgraph.graph.tracing import TracePlace, Untraced
from breakgraph.models.live_rows import live_count
from breakgraph.models.routing import show_routing

LIVE_GROUPED_MM = "breakgraph_grouped_mm"
TRITON = "breakgraph_triton"


def _live_grouped_mm(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] to [T, H]; padding rows are zero."""
    num_live = live_token_count(hidden_states.shape[0])
    show_routing(top_k_index, module.num_experts, num_live)
    if num_live is not None:
        is_padding = (torch.arange(hidden_states.shape[0], device=hidden_states.device) >= num_live)[:, None]
        top_k_index = top_k_index.masked_fill(is_padding, module.num_experts)
        top_k_weights = top_k_weights.masked_fill(is_padding, 0.0)
    experts: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return experts


def _triton(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `_live_grouped_mm`, in our kernels; for models that `triton_refusals` has nothing against.

    Dynamo traces it: one operator, which a rewrite may give what is added to its result.
    """
    from breakgraph.models.expert_ops import gated_experts

    num_live = live_count(hidden_states.shape[0])
    experts: torch.Tensor = gated_experts(
        hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights, num_live
    )
    return experts


_FUNCTIONS = {LIVE_GROUPED_MM: _live_grouped_mm, TRITON: _triton}
for _name, _function in _FUNCTIONS.items():
    ExpertsInterface.register(_name, _function)
_places = {
    name: TracePlace(partial(ExpertsInterface.register, name), function, Untraced(function))
    for name, function in _FUNCTIONS.items()
}


def triton_refusals(model: PreTrainedModel) -> list[str]:
    """What about the model's experts our kernels do not compute, where they compute not all of them."""
    modules = [module for module in model.modules() if hasattr(module, "has_gate")]
    return sorted({reason for module in modules if (reason := _refusal(module)) is not None})


def _refusal(module: Any) -> str | None:
    if not module.has_gate:
        return "they have no gate"
    if not module.is_concatenated:
        return "gates and up projections take turns in their weights"
    if module.is_transposed:
        return "their weights are transposed"
    if module.has_bias:
        return "they have biases"
    if type(module)._apply_gate is not moe._default_apply_gate:
        return "they gate in a way of their own"
    if not isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation):
        return f"they are activated by {type(module.act_fn).__name__}, not SiLU"
    return None


def hide_experts() -> None:
    """Make Dynamo leave the experts alone that are no operator: it compiles what lies before them and what lies behind
    them."""
    _places[LIVE_GROUPED_MM].hide()


def has_traced_experts(block: torch.nn.Module) -> bool:
    """Whether Dynamo meets experts in it that want to be given the number of live rows, see live_rows.py."""
    modules: Iterator[Any] = (module for module in block.modules() if hasattr(module, "has_gate"))
    return any(module.config._experts_implementation == TRITON for module in modules)

"""Experts that leave out padding: what a bucket adds to a step costs its dense layers, and no expert.

`transformers` computes all rows. Here the rows behind the live ones are routed to an expert that does not exist. Our
Triton kernels skip it; so does the grouped matrix multiplication of `transformers`, which takes every kind of experts:
such rows lie behind the last group and come out as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from breakgraph.attention import live_token_count
from breakgraph.graph.tracing import TracePlace, Untraced

LIVE_GROUPED_MM = "breakgraph_grouped_mm"
TRITON = "breakgraph_triton"

RoutingWatcher = Callable[[torch.Tensor, int], None]
"""Called with each layer's choice, expert indices [live tokens, k], and its number of experts."""
_watchers: list[RoutingWatcher] = []


@contextmanager
def watch_routing(watcher: RoutingWatcher) -> Iterator[None]:
    """Show where the experts of this module are sent tokens while the forward runs as Python; replays show nothing."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _show(module: Any, top_k_index: torch.Tensor, num_live: torch.Tensor | None) -> None:
    for watcher in _watchers:
        watcher(top_k_index if num_live is None else top_k_index[: int(num_live)], module.num_experts)


def _live_grouped_mm(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] to [T, H]; padding rows are zero."""
    num_live = live_token_count(hidden_states.shape[0])
    _show(module, top_k_index, num_live)
    if num_live is not None:
        is_padding = (torch.arange(hidden_states.shape[0], device=hidden_states.device) >= num_live)[:, None]
        top_k_index = top_k_index.masked_fill(is_padding, module.num_experts)
        top_k_weights = top_k_weights.masked_fill(is_padding, 0.0)
    experts: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return experts


def _triton(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `_live_grouped_mm`, in our kernels; for models that `triton_refusals` has nothing against."""
    from breakgraph.models.expert_ops import gated_experts

    num_live = live_token_count(hidden_states.shape[0])
    _show(module, top_k_index, num_live)
    experts: torch.Tensor = gated_experts(
        hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights, num_live
    )
    return experts


_FUNCTIONS = {LIVE_GROUPED_MM: _live_grouped_mm, TRITON: _triton}
for _name, _function in _FUNCTIONS.items():
    ExpertsInterface.register(_name, _function)
_places = [
    TracePlace(partial(ExpertsInterface.register, name), function, Untraced(function))
    for name, function in _FUNCTIONS.items()
]


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
    """Make Dynamo leave the experts alone: it compiles what lies before them and what lies behind them."""
    for place in _places:
        place.hide()

"""Experts that leave out padding: what a bucket adds to a step costs its dense layers, and no expert.

`transformers` computes all rows. Here the rows behind the live ones are routed to an expert that does not exist, which
its grouped matrix multiplication skips: such rows lie behind the last group and come out as zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from breakgraph.attention import live_token_count
from breakgraph.graph.tracing import TracePlace, Untraced

LIVE_GROUPED_MM = "breakgraph_grouped_mm"


def _live_grouped_mm(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k] to [T, H]; padding rows are zero."""
    num_live = live_token_count(hidden_states.shape[0])
    if num_live is not None:
        is_padding = (torch.arange(hidden_states.shape[0], device=hidden_states.device) >= num_live)[:, None]
        top_k_index = top_k_index.masked_fill(is_padding, module.num_experts)
        top_k_weights = top_k_weights.masked_fill(is_padding, 0.0)
    experts: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    return experts


ExpertsInterface.register(LIVE_GROUPED_MM, _live_grouped_mm)
_place = TracePlace(partial(ExpertsInterface.register, LIVE_GROUPED_MM), _live_grouped_mm, Untraced(_live_grouped_mm))


def hide_experts() -> None:
    """Make Dynamo leave the experts alone: it compiles what lies before them and what lies behind them."""
    _place.hide()

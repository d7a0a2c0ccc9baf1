"""What the tests of a whole LLM share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from breakgraph.engine.ahead import NotAhead, StepAhead

Reference = Callable[[Sequence[int], int], list[int]]
"""(prompt, max_tokens) to the greedy tokens of transformers' own generate."""

SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "prefill_buckets": (4, 16),
    "decode_buckets": (2, 8),
    # As many as can be in use: on a GPU several LLMs are open at once, and a cache would take all the memory.
    "num_gpu_blocks_override": 65,
    "use_tqdm": False,
}
"""Options that make chunks of almost every prompt, and few captures."""


def launch_none_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each step is launched when the one before it is over."""
    monkeypatch.setattr(StepAhead, "why_not", lambda self, step, *, is_checked: NotAhead.LIVE_CHECK)

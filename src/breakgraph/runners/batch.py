"""What the scheduler hands to a runner for one step: host values, and tokens that the host may not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from breakgraph.errors import ConfigError

Ints: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""Host integers; numpy arrays and ``array`` are read fastest."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """One step, requests back to back."""

    input_ids: Ints | Tensor
    """[num_tokens]. Int64 on the device where the step before drew them: the host need not have seen them."""
    positions: Ints
    """[num_tokens] position of each token in its request."""
    slot_mapping: Ints
    """[num_tokens] KV slot each token writes: block * block_size + offset."""
    q_lens: Ints
    """[num_reqs] new tokens."""
    seq_lens: Ints
    """[num_reqs] tokens after this step, cached ones included."""
    block_tables: Sequence[Ints]
    """[num_reqs] KV blocks of each request, in order; entries past seq_len are allowed."""
    logits_rows: Ints
    """[num_reqs] index among the tokens of each request's last token."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_reqs(self) -> int:
        return len(self.q_lens)

    @property
    def num_live_tokens(self) -> Ints:
        """[1] num_tokens, for what reads it on the device."""
        return (self.num_tokens,)

    @property
    def cu_seqlens_q(self) -> Ints:
        """[num_reqs + 1] running sum of q_lens from 0."""
        return list(accumulate(self.q_lens, initial=0))

    def check(self) -> None:
        """Raises ConfigError where lengths disagree; says which field, and what it should be."""
        if self.num_reqs == 0:
            raise ConfigError("a step needs at least one request, got none; skip empty steps")
        for name in ("positions", "slot_mapping"):
            _expect_len(name, getattr(self, name), self.num_tokens, "input_ids")
        for name in ("seq_lens", "block_tables", "logits_rows"):
            _expect_len(name, getattr(self, name), self.num_reqs, "q_lens")
        if sum(self.q_lens) != self.num_tokens:
            raise ConfigError(f"q_lens: expected a sum of {self.num_tokens} (input_ids), got {sum(self.q_lens)}")
        for index, (q_len, seq_len) in enumerate(zip(self.q_lens, self.seq_lens, strict=True)):
            if not 1 <= q_len <= seq_len:
                raise ConfigError(
                    f"request {index}: expected 1 <= q_len <= seq_len, got q_len {q_len}, seq_len {seq_len}"
                )
        for index, row in enumerate(self.logits_rows):
            if not 0 <= row < self.num_tokens:
                raise ConfigError(f"logits_rows[{index}]: expected 0 <= row < {self.num_tokens} (tokens), got {row}")


def _expect_len(name: str, values: Ints | Tensor | Sequence[Ints], expected: int, other: str) -> None:
    if len(values) != expected:
        raise ConfigError(f"{name}: expected {expected} entries as in {other}, got {len(values)}")

"""One step's attention metadata, and the context through which breaks read it.

Breaks must see the batch of *this* replay, so nothing here is ever passed as a break argument: the runner enters
`use_step`, and the code inside the break asks for `current_step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from breakgraph.attention.base import AttentionMetadata

HostTables: TypeAlias = Sequence[Sequence[int] | NDArray[np.integer[Any]]]
"""Rows of a block table."""


@dataclass(frozen=True, kw_only=True)
class RequestTensors:
    """What the device knows of R requests, or request slots."""

    cu_seqlens_q: torch.Tensor | None = None
    """[R + 1] int32, running sum of the new tokens from 0; None in the decode phase."""
    seq_lens: torch.Tensor
    """[R] int32."""
    block_tables: torch.Tensor
    """[R, max_blocks] int32; unused entries are 0, the reserved block."""


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """Which tokens belong to which request in one forward.

    Tokens are packed request by request; rows from `num_tokens` on are padding. In the decode phase each row is one
    request's only new token, the device tensors have `padded_num_tokens` rows, and the host lengths may be empty.

    With `fixed_slots` the device tensors lie at fixed addresses and have R request slots, whatever the number of live
    requests: a graph may hold the step. The slots behind the live ones are sentinels: `seq_lens` 0, `cu_seqlens_q`
    parked at `num_tokens`, block tables all 0.
    """

    phase: str
    num_tokens: int
    """Live rows."""
    padded_num_tokens: int
    """All rows: the bucket, or `num_tokens` when the step is not padded."""
    q_lens: tuple[int, ...] = ()
    """New tokens of each live request."""
    seq_lens: tuple[int, ...] = ()
    """Tokens of each live request once this step has run: cached ones and new ones."""
    block_tables: HostTables = ()
    """Blocks of each live request, in order, for kernels that are planned on the host; may be empty."""
    requests: Callable[[], RequestTensors]
    """On the device, the same at every call: they may be copied there when somebody first asks. Those of a bucket lie
    in its static buffers, and the next step is written over them."""
    slot_mapping_gpu: torch.Tensor
    """[padded_num_tokens] int64, block * block_size + offset; padding rows are 0."""
    num_tokens_gpu: torch.Tensor | None = None
    """[1] int32: `num_tokens` for what runs inside a graph, such as expert routing; None where nothing is padded."""
    fixed_slots: bool = False
    """Whether the device tensors have a fixed number of request slots, unused ones being sentinels."""

    @property
    def cu_seqlens_q_gpu(self) -> torch.Tensor | None:
        return self.requests().cu_seqlens_q

    @property
    def seq_lens_gpu(self) -> torch.Tensor:
        return self.requests().seq_lens

    @property
    def block_tables_gpu(self) -> torch.Tensor:
        return self.requests().block_tables

    def __post_init__(self) -> None:
        assert 0 <= self.num_tokens <= self.padded_num_tokens, (
            f"{self.num_tokens} live tokens in a step of {self.padded_num_tokens}"
        )
        assert len(self.q_lens) == len(self.seq_lens), f"{len(self.q_lens)} q_lens, {len(self.seq_lens)} seq_lens"
        assert not self.q_lens or sum(self.q_lens) == self.num_tokens, (
            f"q_lens sum to {sum(self.q_lens)}, the step has {self.num_tokens} live tokens"
        )
        assert all(0 < new <= total for new, total in zip(self.q_lens, self.seq_lens, strict=True)), (
            f"each request needs 1 <= new tokens <= total tokens, got {self.q_lens} of {self.seq_lens}"
        )

    def assert_one_token_a_row(self) -> None:
        """What the decode phase promises, for implementations that rely on it."""
        assert all(new == 1 for new in self.q_lens), f"a decode step has one new token a request, got {self.q_lens}"
        rows = self.block_tables_gpu.shape[0]
        assert rows == self.padded_num_tokens, f"{rows} block table rows for {self.padded_num_tokens} decode rows"


_current: ContextVar[weakref.ref[use_step] | None] = ContextVar("breakgraph_attention_step", default=None)
"""Weak, so that a step is over as soon as nobody is in its `with` any more: an interrupt of the user's can come between
the end of the block and the first line of `__exit__`."""


class use_step:
    """Makes `metadata` the one that attention calls on this thread see; not nested, so that no step sees another's.

    Given a function, it is called when attention first asks: what comes before is launched without waiting for a plan.
    """

    __slots__ = ("__weakref__", "_metadata")

    def __init__(self, metadata: AttentionMetadata | Callable[[], AttentionMetadata]) -> None:
        self._metadata = metadata

    def __enter__(self) -> None:
        if _step_in_progress() is not None:
            raise RuntimeError("a step is already in progress on this thread; leave its use_step before the next one")
        _current.set(weakref.ref(self))

    def __exit__(self, *exc: object) -> None:
        _current.set(None)

    def planned(self) -> AttentionMetadata:
        """The metadata, which is made now if nobody has asked yet."""
        metadata = self._metadata
        if callable(metadata):
            metadata = self._metadata = metadata()
        return metadata


def _step_in_progress() -> use_step | None:
    step = _current.get()
    return None if step is None else step()


def current_step() -> AttentionMetadata:
    """The metadata of the step in progress. Raises RuntimeError outside `use_step`."""
    metadata = _metadata()
    if metadata is None:
        raise RuntimeError("attention was called outside a step; call the model inside `with use_step(metadata):`")
    return metadata


def _metadata() -> AttentionMetadata | None:
    step = _step_in_progress()
    return None if step is None else step.planned()


def live_token_count(num_rows: int) -> torch.Tensor | None:
    """How many of the step's `num_rows` token rows are live, [1] int32 on the device; None where none is padding.

    For what is recorded into a graph and should not spend time on padding. Also None outside `use_step`.
    """
    metadata = _metadata()
    if metadata is None or metadata.step.num_tokens_gpu is None:
        return None
    expected = metadata.step.padded_num_tokens
    assert num_rows == expected, f"{num_rows} rows in a step of {expected}: which of them are live is not known"
    return metadata.step.num_tokens_gpu

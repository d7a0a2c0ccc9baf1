"""Ranks that capture and replay together: each says what it is about to do, and none does it unless all agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from breakgraph.errors import ConfigError, RankMismatchError

if TYPE_CHECKING:
    from breakgraph.graph.plan import Plan

MESSAGE_BYTES = 256  # a longer text keeps its beginning and ends in a hash of the whole

_captures: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Captures that a group's ranks agreed on, in all families: the same number on every rank."""


class Ranks:
    """The ranks of one plan family, asked before each of its captures and replays.

    Each question is one ``all_gather`` in host memory of :data:`MESSAGE_BYTES` bytes a rank. Borrows: the group.
    Raises ConfigError for no process group that this process is in, and for one whose backend takes no CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise ConfigError(f"expected group= to be a process group with this process in it, got {group!r}")
        backend = dist.get_backend_config(group)
        if "cpu" not in [part.partition(":")[0] for part in backend.split(",")]:
            raise ConfigError(
                f"expected a group= whose backend takes CPU tensors, got {backend}; pass a gloo group of the same "
                'ranks, e.g. dist.new_group(backend="gloo")'
            )
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._messages: WeakKeyDictionary[Plan, bytes] = WeakKeyDictionary()
        self._is_awaited = False  # the others wait for this rank's next message
        # Compared as bytes: an exchange may happen in a break, where host reads of tensors are watched.
        self._sent, self._received = bytearray(MESSAGE_BYTES), bytearray(MESSAGE_BYTES * len(self._ranks))
        with torch.inference_mode(False):
            self._sent_tensor = torch.frombuffer(self._sent, dtype=torch.uint8)
            self._received_tensors = list(torch.frombuffer(self._received, dtype=torch.uint8).split(MESSAGE_BYTES))

    @contextmanager
    def capturing(self, what: str) -> Iterator[None]:
        """Around a capture: all ranks begin the same one, and an exception on this rank is told to the others."""
        self._compare(_packed(f"capture {what}"))
        try:
            yield
        except BaseException as error:
            if self._is_awaited:
                self.tell(f"capture {what}", error)
            raise

    def check_warm_up(self) -> None:
        """After the warm-up: breaks may hold collectives, so that no rank captures unless all do."""
        self._compare(_packed("capture after the warm-up"))

    def check_structure(self, plan: Plan) -> None:
        """After a capture: the plan is closed unless every rank has one with the same segments and breaks."""
        names = groupby(step.name for step in plan.explain().steps if step.kind == "break")
        breaks = ", ".join(f"{name} x {len(list(same))}" for name, same in names) or "none"
        try:
            self._compare(_packed(f"keep {plan.num_segments} segments, breaks {breaks}"))
        except BaseException:
            plan.close()
            raise
        self._is_awaited = False
        number = _captures[self._group] = _captures.get(self._group, 0) + 1
        self._messages[plan] = _packed(f"replay {plan.label or 'a plan'}, capture {number} of the group")

    def check_replay(self, plan: Plan) -> None:
        """Before a replay. A rank whose plan is stale or closed raises that error, and the others hear of it."""
        try:
            plan.check()
        except BaseException as error:
            self.tell(f"replay {plan.label or 'a plan'}", error)
            raise
        self._compare(self._messages[plan])

    def _compare(self, message: bytes) -> None:
        self._is_awaited = False
        self._exchange(message)
        if self._received != message * len(self._ranks):
            texts = [self._received[i * MESSAGE_BYTES :][:MESSAGE_BYTES].rstrip(b"\0") for i in range(len(self._ranks))]
            wanted = [f"rank {i}: {text.decode(errors='replace')}" for i, text in zip(self._ranks, texts, strict=True)]
            raise RankMismatchError(
                f"the ranks do not want the same: {'; '.join(wanted)}. No plan was replayed or kept; let every rank "
                "capture and replay the same plans with the same breaks in the same order, and choose the bucket from "
                "what all of them know"
            )
        self._is_awaited = True

    def tell(self, what: str, error: BaseException) -> None:
        """Say in place of the next message that this rank gives up ``what``; ``error`` is then raised here."""
        try:
            self._exchange(_packed(f"{what}, which failed: {type(error).__name__}: {error}"))
        except Exception as unheard:  # the error to be told is the one that matters
            error.add_note(f"the other ranks were not told: {unheard}")

    def _exchange(self, message: bytes) -> None:
        self._sent[:] = message
        dist.all_gather(self._received_tensors, self._sent_tensor, group=self._group)


def _packed(text: str) -> bytes:
    data = " ".join(text.split()).encode(errors="backslashreplace")
    if len(data) > MESSAGE_BYTES:
        end = f"... ({hashlib.sha256(data).hexdigest()[:32]})".encode()
        data = data[: MESSAGE_BYTES - len(end)] + end
    return data.ljust(MESSAGE_BYTES, b"\0")

"""Answers that are followed in another process: what may come next is asked for and taken in without waiting."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from breakgraph.engine import guided_worker
from breakgraph.engine.guide import NO_TOKEN_FITS, Guide, stop_mask
from breakgraph.errors import ConfigError


@dataclass(frozen=True)
class GuideLimits:
    """Of one grammar. Times are CPU seconds of all its threads."""

    compile_sec: float = 30.0
    token_sec: float = 2.0
    """For what may follow one token."""
    memory_bytes: int = 1 << 30
    """Of address space."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be > 0, got {value!r}")

    @property
    def memory(self) -> str:
        return f"{self.memory_bytes / (1 << 20):.0f} MiB of memory"


class _RemoteGuide:
    """One answer of a grammar in another process."""

    def __init__(self, grammar: RemoteGrammar, number: int) -> None:
        self.failure: str | None = None
        self.bits_W: Tensor | None = None
        self.num_awaited = 1
        """Replies; what counts is the last one."""
        self._grammar = grammar
        self._number = number

    def allowed(self) -> Tensor | None:
        self._grammar.read()
        return self.bits_W

    def wait(self, timeout_sec: float) -> None:
        if self.bits_W is None:
            self._grammar.wait(timeout_sec)

    def accept(self, token_id: int) -> None:
        if self.failure is None:
            self.bits_W = None
            self.num_awaited += 1
            self._grammar.send(guided_worker.NEXT, self._number, token_id)

    def __del__(self) -> None:
        self._grammar.drop(self._number)


class RemoteGrammar:
    """The near end of a grammar's process. Thread-safe. Owns: `link`. Nothing but `wait` waits."""

    def __init__(
        self, link: socket.socket, stop_token_ids: Iterable[int], vocab_size: int, limits: GuideLimits
    ) -> None:
        self._link = link
        self._limits = limits
        self._num_words = -(-vocab_size // 32)
        self._stop_mask = stop_mask(stop_token_ids, self._num_words)
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._inbox = bytearray()
        self._is_lost = False
        self._num_guides = 0
        self._guides: WeakValueDictionary[int, _RemoteGuide] = WeakValueDictionary()

    @property
    def is_lost(self) -> bool:
        self.read()
        return self._is_lost

    def guide(self) -> Guide:
        with self._lock:
            self._num_guides += 1
            guide = self._guides[self._num_guides] = _RemoteGuide(self, self._num_guides)
        self.send(guided_worker.OPEN, guide._number)
        return guide

    def send(self, what: int, number: int, token_id: int = 0) -> None:
        self._outbox.append(guided_worker.COMMAND.pack(what, number, token_id))
        self.read()

    def drop(self, number: int) -> None:
        """Also while the garbage is collected, where nothing may be waited for: it is sent with what comes next."""
        self._outbox.append(guided_worker.COMMAND.pack(guided_worker.DROP, number, 0))

    def wait(self, timeout_sec: float) -> None:
        with contextlib.suppress(ValueError):  # closed
            poll = select.poll()
            poll.register(self._link, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poll.poll(timeout_sec * 1000)
        self.read()

    def read(self) -> None:
        """Sends and takes in what can be without waiting."""
        with self._lock:
            if self._is_lost:
                self._fail()
                return
            try:
                self._flush()
                self._receive()
            except OSError:
                self._is_lost = True
            self._take_replies()
            if self._is_lost:
                self._link.close()
                self._fail()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outbox:
                command = self._outbox[0]
                num_sent = self._link.send(command, socket.MSG_DONTWAIT)
                self._outbox[0] = command[num_sent:]
                if num_sent == len(command):
                    self._outbox.popleft()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._link.recv(1 << 16, socket.MSG_DONTWAIT):
                self._inbox += data
            self._is_lost = True  # the other end is closed

    def _take_replies(self) -> None:
        size = guided_worker.REPLY.size + 4 * self._num_words
        while len(self._inbox) >= size:
            number, fits = guided_worker.REPLY.unpack_from(self._inbox)
            bits_W = torch.frombuffer(self._inbox[guided_worker.REPLY.size : size], dtype=torch.int32)
            del self._inbox[:size]
            guide = self._guides.get(number)
            if guide is None:
                continue
            guide.num_awaited -= 1
            if guide.num_awaited == 0:
                guide.bits_W = bits_W if fits else self._stop_mask
                guide.failure = None if fits else NO_TOKEN_FITS

    def _fail(self) -> None:
        """Answers that wait will get nothing any more."""
        for guide in list(self._guides.values()):
            if guide.bits_W is None:
                guide.bits_W = self._stop_mask
                guide.failure = (
                    f"the form that is asked for takes more than {self._limits.token_sec:g} s of computing for one "
                    f"token, or more than {self._limits.memory}; write it without nested repetitions"
                )

    def close(self) -> None:
        with self._lock:
            self._is_lost = True
            self._link.close()
            self._fail()

    def __del__(self) -> None:
        self._link.close()

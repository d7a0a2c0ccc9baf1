"""Grammars of strangers: compiled and followed in processes of their own, which may take too long and be lost.

A short expression can take xgrammar hours or all memory, when it is compiled or at any token later. There it harms
nobody: the engine asks for the tokens that may follow and goes on with other answers until they are known.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from breakgraph.engine import guided_worker
from breakgraph.engine.guided import CANNOT_BEGIN, kind_of, open_vocabulary, unusable
from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.engine.guided_remote import GuideLimits, RemoteGrammar
from breakgraph.errors import BreakgraphError, ClosedError, ConfigError

_NUM_KEPT = 16
"""Grammars that are kept though no answer has them, those used last."""
_NUM_REFUSED = 256
"""Refusals that are remembered."""


class GuideProcesses:
    """Makes grammars for one tokenizer, each in a process that has limits. Thread-safe.

    The first grammar takes seconds longer: only then a process is started that has xgrammar, of which those of grammars
    are forks. It has no GPU and none of this process's sockets and files.

    A grammar that an answer has is found again at once, as are those used last, and what was refused.
    Owns: the processes. Closed by: its owner.

    Args:
        tokenizer, vocab_size, eos_token_ids: as for GrammarCompiler.
        limits: of each grammar.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int], limits: GuideLimits | None = None
    ) -> None:
        self.limits = limits or GuideLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._links: set[socket.socket] = set()
        """Of grammars that are being compiled."""
        self._held: WeakValueDictionary[GuidedDecodingParams, RemoteGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[GuidedDecodingParams, RemoteGrammar] = OrderedDict()
        self._refused: OrderedDict[GuidedDecodingParams, str] = OrderedDict()
        self._is_closed = False

    def compile(self, params: GuidedDecodingParams) -> RemoteGrammar:
        """Waits for it.

        Raises ConfigError as GrammarCompiler and for a grammar that passes a limit, ClosedError after `close`, and
        BreakgraphError when the processes cannot be started or were killed by somebody else.
        """
        with self._lock:
            grammar = self._held.get(params)
            if grammar is not None and not grammar.is_lost:
                self._keep(params, grammar)
                return grammar
            if params in self._refused:
                raise ConfigError(self._refused[params])
        link = self._open_link()
        try:
            answer = _ask(link, {"schema": params.schema, "regex": params.regex})
        finally:
            with self._lock:
                self._links.discard(link)
        refusal = self._refusal(params, answer)
        with self._lock:
            if refusal is None and not self._is_closed:
                grammar = RemoteGrammar(link, self._eos_token_ids, self._vocab_size, self.limits)
                self._held[params] = grammar
                self._keep(params, grammar)
                return grammar
            link.close()
            self._check_open()
            assert refusal is not None, "open, so it was refused"
            if not self._is_running():
                raise BreakgraphError("the process for grammars ended; send the request again")
            self._refused[params] = refusal
            if len(self._refused) > _NUM_REFUSED:
                self._refused.popitem(last=False)
        raise ConfigError(refusal)

    def close(self) -> None:
        """Ends all processes; answers that are guided fail, and so does what is being compiled."""
        with self._lock:
            self._is_closed = True
            links, worker, control = list(self._links), self._worker, self._control
            grammars = list(self._held.values())
            self._kept.clear()
            self._worker = self._control = None
        if control is not None:
            control.close()
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # whoever reads from it goes on
        for grammar in grammars:
            grammar.close()
        if worker is not None:
            worker.wait()

    def _keep(self, params: GuidedDecodingParams, grammar: RemoteGrammar) -> None:
        self._kept[params] = grammar
        self._kept.move_to_end(params)
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)

    def _refusal(self, params: GuidedDecodingParams, answer: dict[str, Any]) -> str | None:
        if "error" in answer:
            return unusable(params, answer["error"])
        if "lost" in answer:
            limit = (
                f"more than {self.limits.compile_sec:g} s of computing"
                if answer["lost"] == "time"
                else f"more than {self.limits.memory}, or more than xgrammar can"
            )
            return (
                f"the {kind_of(params)} takes {limit} to compile; make it smaller, with fewer optional parts and "
                "repetitions"
            )
        return None if answer["fits"] else CANNOT_BEGIN

    def _open_link(self) -> socket.socket:
        """The near end of a new grammar's socket."""
        near, far = socket.socketpair()
        with far, self._lock:
            try:
                self._check_open()
                if not self._is_running():
                    self._start()
                assert self._control is not None, "started"
                socket.send_fds(self._control, [b"g"], [far.fileno()])
            except BaseException:
                near.close()
                raise
            self._links.add(near)
        return near

    def _is_running(self) -> bool:
        return self._worker is not None and self._worker.poll() is None

    def _start(self) -> None:
        vocabulary = open_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        near, far = socket.socketpair()
        program = [sys.executable, "-P", str(Path(guided_worker.__file__))]
        with far:
            self._worker = subprocess.Popen(
                ["env", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1", *program],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if self._control is not None:
            self._control.close()
        self._control = near
        answer = _ask(near, {"vocabulary": vocabulary.serialize_json(), **asdict(self.limits)})
        if answer:
            raise BreakgraphError(f"the process for grammars does not start: exit status {self._worker.wait()}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the server is going down")


def _ask(link: socket.socket, question: dict[str, Any]) -> dict[str, Any]:
    """One line there, one line back; what is lost when there is none."""
    line = b""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(question).encode() + b"\n")
        while not line.endswith(b"\n") and (data := link.recv(1 << 16)):
            line += data
    answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"lost": "memory"}
    return answer

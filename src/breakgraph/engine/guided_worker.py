"""A program that compiles grammars and follows answers in them, in processes that may be lost.

It runs by its path and imports nothing of this package. Its standard input is a socket:

1. One line of JSON: the vocabulary as xgrammar writes it, and the limits.
2. It answers with a line: `{}` when it is ready.
3. Then every byte comes with one end of another socket, for a grammar. Each grammar has a process of its own, forked
   from this one, which has loaded everything by then. When the standard input ends, all of them do.

On a grammar's socket: a line `{"schema": ...}` or `{"regex": ...}` comes, and a line goes back, `{"fits": bool}` or one
with `error` or `lost`. From then on COMMANDs come, and each but DROP is answered by a REPLY and the bits of the tokens
that may follow. A process that takes more CPU time than a limit allows, or more memory, is lost: its socket ends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

COMMAND = struct.Struct("<BQI")
"""What to do, number of the answer, token."""
OPEN, NEXT, DROP = range(3)
REPLY = struct.Struct("<QB")
"""Number of the answer, whether a token fits. The bits follow: 4 * ceil(V / 32) bytes."""

_MAX_THREADS = 4
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+: ")


def compile_grammar(compiler: Any, schema: str | None, regex: str | None) -> Any:
    """One of the two with a compiler of xgrammar, whose errors come through."""
    if schema is not None:
        return compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=False)
    return compiler.compile_regex(regex)


def reason_of(error: Exception) -> str:
    """What an error of xgrammar says, without the place in its source."""
    return _SOURCE_LINE.sub("", str(error)).strip()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever has the other end decides when this ends
    control = socket.socket(fileno=0)
    settings = json.loads(_read_line(control))
    import xgrammar

    vocabulary = xgrammar.TokenizerInfo.deserialize_json(settings["vocabulary"])
    control.sendall(b"{}\n")
    _Parent(control, vocabulary, settings).run()


def _read_line(link: socket.socket) -> bytes:
    """Without anything that comes after it."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        parts.append(link.recv(1 << 16))
        if not parts[-1]:
            raise SystemExit
    return b"".join(parts)


class _Parent:
    """Forks a process a grammar, and says on its socket what became of it."""

    def __init__(self, control: socket.socket, vocabulary: Any, settings: dict[str, Any]) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._settings = settings
        self._links: dict[int, socket.socket] = {}
        """By process."""
        self._wakeup, self._wakeup_write = os.pipe()

    def run(self) -> NoReturn:
        os.set_blocking(self._wakeup_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_write)
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._wakeup], [], [])
            if self._wakeup in ready:
                os.read(self._wakeup, 512)
                self._reap()
            if control in ready:
                data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    for pid in self._links:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                self._fork(socket.socket(fileno=fds[0]))

    def _fork(self, link: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError:
            self._say_lost(link, "memory")
            return
        if pid:
            self._links[pid] = link
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._control, *self._links.values()):
            other.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)
        _serve(link, self._vocabulary, self._settings)

    def _reap(self) -> None:
        while self._links:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._say_lost(self._links.pop(pid), "time" if ended_by == signal.SIGPROF else "memory")

    def _say_lost(self, link: socket.socket, what: str) -> None:
        with suppress(OSError):  # nobody listens any more
            link.send(json.dumps({"lost": what}).encode() + b"\n", socket.MSG_DONTWAIT)
        link.close()


def _serve(link: socket.socket, vocabulary: Any, settings: dict[str, Any]) -> NoReturn:
    """All that a grammar's process does."""
    status = 1
    try:
        _limit_memory(settings["memory_bytes"])
        commands = link.makefile("rb")
        compiled = _compile(link, json.loads(commands.readline()), vocabulary, settings["compile_sec"])
        if compiled is not None:
            _follow(link, commands, compiled, vocabulary.vocab_size, settings["token_sec"])
        status = 0
    finally:
        os._exit(status)


def _limit_memory(num_bytes: int) -> None:
    """Of the address space, on top of what is there."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    """SIGPROF after so much CPU time of all threads."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _compile(link: socket.socket, form: dict[str, str | None], vocabulary: Any, seconds: float) -> Any:
    """None when that failed; it has been said then."""
    from xgrammar import GrammarCompiler, GrammarMatcher, allocate_token_bitmask

    compiled: Any = None
    answer: dict[str, Any]
    with _limited_time(seconds):
        try:
            compiled = compile_grammar(
                GrammarCompiler(vocabulary, max_threads=_MAX_THREADS, cache_enabled=False), **form
            )
            bits = allocate_token_bitmask(1, vocabulary.vocab_size)
            answer = {"fits": not GrammarMatcher(compiled).fill_next_token_bitmask(bits) or bool(bits.any())}
        except Exception as error:  # of whatever class its C++ has for this
            compiled, reason = None, reason_of(error)
            has_no_memory = isinstance(error, MemoryError) or "bad_alloc" in reason
            answer = {"lost": "memory"} if has_no_memory else {"error": reason}
    link.sendall(json.dumps(answer).encode() + b"\n")
    return compiled


def _follow(link: socket.socket, commands: Any, compiled: Any, vocab_size: int, seconds: float) -> None:
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    matchers: dict[int, Any] = {}
    bits = allocate_token_bitmask(1, vocab_size)
    while len(command := commands.read(COMMAND.size)) == COMMAND.size:
        what, number, token_id = COMMAND.unpack(command)
        with _limited_time(seconds):
            if what == DROP:
                matchers.pop(number, None)
                continue
            if what == OPEN:
                matchers[number] = GrammarMatcher(compiled)
            fits = what == OPEN or matchers[number].accept_token(token_id)
            if not fits:
                bits.zero_()
            elif not matchers[number].is_terminated():
                bits.zero_()
                if not matchers[number].fill_next_token_bitmask(bits):
                    bits.fill_(-1)
                fits = bool(bits.any())
        link.sendall(REPLY.pack(number, fits) + bits.numpy().tobytes())


if __name__ == "__main__":
    main()

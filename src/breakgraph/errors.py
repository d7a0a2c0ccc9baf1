"""Every exception that breakgraph raises on purpose.

::

    BreakgraphError
    ├── ConfigError (ValueError)             a value the user gave cannot be used
    │   ├── UnknownNameError                 no such backend, attention, phase, preset or module pattern
    │   ├── ModelNotFoundError               no model folder at that path
    │   ├── WeightsError                     the folder is there, its files cannot be read as weights
    │   ├── UnsupportedModelError            an architecture that cannot be served, and what it lacks
    │   └── PromptError                      a request that is refused on its own
    │       ├── EmptyPromptError
    │       ├── PromptTooLongError           longer than the context
    │       └── RequestTooLargeError         can never fit the KV cache
    ├── CaptureError (RuntimeError)          a capture failed; nothing was published
    │   ├── UncapturableOpError              host sync, data-dependent shape, pageable copy in a segment
    │   │   └── HazardError                  all of these at once, found in a run before the capture
    │   ├── BreakArgumentError               a break argument that would go stale
    │   ├── BreakResultError                 a break result that cannot cross its boundary
    │   ├── StalePoolTensorError             a pool tensor that is older than the plan being captured
    │   ├── PoolLeakError                    a pool tensor that outlived the capture
    │   ├── UntraceableError                 torch.compile cannot trace the forward as a whole
    │   ├── BakedValueError                  two captures of one bucket hold different values
    │   ├── EmptySegmentError                operations were seen, the graph holds none
    │   ├── ForeignCaptureError              a marked call while somebody else captures on this stream
    │   ├── VerificationError                a replay differs from eager; carries the report
    │   └── CaptureUnavailableError          an earlier failure left this process unable to capture
    ├── ReplayError (RuntimeError)           this replay is void, the plan is not
    │   ├── ResultMismatchError              a break's result no longer matches its boundary
    │   ├── StalePlanError                   a weight was replaced, a mode was changed, or the plan was invalidated
    │   ├── UnwrittenReadError               CPU device: pool bytes read that this replay has not written
    │   ├── UndeclaredWriteError             CPU device: a break wrote an argument it does not list in mutates=
    │   └── StaleOutputError                 a borrowed output after a later replay
    ├── RankMismatchError                    ranks want different captures or replays (CaptureError and ReplayError)
    ├── QueueFullError (RuntimeError)        as many requests as may wait are waiting; try again later
    └── ClosedError (RuntimeError)           the plan, family or engine was closed

    HazardWarning (UserWarning)              what HazardError would have said, with on_hazard="warn"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakgraph.graph.hazards import HazardReport


class BreakgraphError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(BreakgraphError, ValueError):
    """A value the user gave cannot be used; the message names what was expected."""


class UnknownNameError(ConfigError):
    """A name that is not registered; the message lists the known ones."""

    def __init__(self, kind: str, name: object, known: object, way_out: str = "") -> None:
        listed = ", ".join(sorted(str(k) for k in known))  # type: ignore[attr-defined]
        super().__init__(f"unknown {kind} {name!r}; known: {listed or 'none'}" + (f". {way_out}" if way_out else ""))


class ModelNotFoundError(ConfigError):
    """No model folder at the given path."""


class WeightsError(ConfigError):
    """A weights file is missing, corrupt or does not fit the configuration."""


class UnsupportedModelError(ConfigError):
    """The architecture cannot be served; the message says what is missing."""


class PromptError(ConfigError):
    """One request is refused; others are not affected."""


class EmptyPromptError(PromptError):
    """A prompt without tokens."""


class PromptTooLongError(PromptError):
    """A prompt that leaves no room in the context."""


class RequestTooLargeError(PromptError):
    """A request that could not fit the KV cache even if it ran alone."""


class CaptureError(BreakgraphError, RuntimeError):
    """A capture failed; nothing was published and the process was put back as it was."""


class UncapturableOpError(CaptureError):
    """An operation that no graph can hold: host sync, data-dependent shape, pageable copy."""


class HazardError(UncapturableOpError):
    """Everything in a function that no graph can hold, listed at once; ``report`` has the parts."""

    def __init__(self, message: str, report: HazardReport) -> None:
        super().__init__(message)
        self.report = report


class HazardWarning(UserWarning):
    """What a :class:`HazardError` would have said."""


class BreakArgumentError(CaptureError):
    """A break argument that is neither a tensor nor an immutable constant."""


class BreakResultError(CaptureError):
    """A break result that cannot be carried into the next segment."""


class StalePoolTensorError(CaptureError):
    """A pool tensor that was allocated before this plan's capture began."""


class PoolLeakError(CaptureError):
    """A pool tensor is still referenced after the capture ended."""


class UntraceableError(CaptureError):
    """The forward cannot be traced as a whole; names the line, and the backend that needs no tracing."""


class BakedValueError(CaptureError):
    """Two captures of one bucket hold different values: a replay of another step would use the wrong ones."""


class EmptySegmentError(CaptureError):
    """Operations were dispatched, but the recorded graph is empty."""


class ForeignCaptureError(CaptureError):
    """A marked call ran while its stream was being captured by somebody else."""


class VerificationError(CaptureError):
    """A replay does not give what eager gives. ``report`` says where it begins to differ."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


class CaptureUnavailableError(CaptureError):
    """This process can no longer capture."""


class ReplayError(BreakgraphError, RuntimeError):
    """A replay failed: its outputs are void, the plan stays usable."""


class ResultMismatchError(ReplayError):
    """A break returned something its boundary cannot take."""


class StalePlanError(ReplayError):
    """What the plan was captured with is not there any more; nothing ran."""


class UnwrittenReadError(ReplayError):
    """CPU device only: pool bytes were read that this replay has not written."""


class UndeclaredWriteError(ReplayError):
    """CPU device only: a break wrote into an argument that it does not declare."""


class StaleOutputError(ReplayError):
    """Borrowed outputs were read after a later replay."""


class RankMismatchError(CaptureError, ReplayError):
    """The ranks of a group are not about to do the same; raised on each of them. No plan was replayed or kept.

    Of both kinds, so that it is caught by what catches a failed capture around one, and a failed replay around one.
    """


class QueueFullError(BreakgraphError, RuntimeError):
    """As many requests as may wait are waiting already; nothing was queued."""


class ClosedError(BreakgraphError, RuntimeError):
    """The object was closed."""

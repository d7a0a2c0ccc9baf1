"""Whether a step can be replayed, and if not, why."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakgraph.backends import Backend
    from breakgraph.runners.spec import PhaseSpec


class EagerReason(Enum):
    """Why a step runs eagerly. The values appear in stats and reports."""

    BACKEND_EAGER = "backend_eager"
    NOT_CAPTURED = "not_captured"
    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_TOKENS = "too_many_tokens"


def admit(spec: PhaseSpec, backend: Backend, num_tokens: int, num_reqs: int) -> EagerReason | None:
    """The reason why a step must run eagerly, or None.

    Reads host values only and changes nothing, so a scheduler may ask before it builds the batch.
    """
    if not backend.captures:
        return EagerReason.BACKEND_EAGER
    bucket = spec.bucket_for(num_tokens, num_reqs)
    if bucket is None:
        fits = num_reqs <= spec.num_rows("requests", spec.ladder[-1])
        return EagerReason.TOO_MANY_TOKENS if fits else EagerReason.TOO_MANY_REQUESTS
    return None if backend.captured(spec.key(bucket)) else EagerReason.NOT_CAPTURED

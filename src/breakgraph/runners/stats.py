"""What a runner did, for people and for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from breakgraph.runners.admission import EagerReason


@dataclass
class RunnerStats:
    """Counts since the runner was made. Steps that raised are not counted."""

    replays: Counter[int] = field(default_factory=Counter)
    """Replays by bucket."""
    eager_steps: Counter[EagerReason] = field(default_factory=Counter)
    num_padded_tokens: int = 0
    """Tokens that replays computed for nobody."""
    capture_sec: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, units in the names."""
        return {
            "num_replays_by_bucket": {str(bucket): count for bucket, count in sorted(self.replays.items())},
            "num_eager_steps_by_reason": {reason.value: count for reason, count in self.eager_steps.items()},
            "num_padded_tokens": self.num_padded_tokens,
            "capture_sec": self.capture_sec,
        }

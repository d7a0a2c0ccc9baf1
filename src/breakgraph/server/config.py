"""What may be set of the server itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from breakgraph.errors import ConfigError

MAX_BODY_BYTES = 8 << 20
"""Of a request; more is refused with 413."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server beside those of the engine. Raises ConfigError for a value that cannot be used."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on; 0.0.0.0 is every interface"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 takes a free one"})
    served_model_name: str | None = field(
        default=None, metadata={"help": "name of the model in requests, instead of what --model says"}
    )
    max_waiting: int = field(
        default=256, metadata={"help": "answers that may wait beside the max_num_seqs that run; more get status 429"}
    )
    request_timeout: float = field(
        default=600.0, metadata={"help": "seconds until a request is given up, waiting included"}
    )
    drain_timeout: int = field(
        default=30, metadata={"help": "seconds that running requests have to end after SIGTERM or Ctrl-C"}
    )
    api_key: str | None = field(default=None, metadata={"help": "what clients must send as bearer token"})

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address or a name, got {self.host!r}")
        _check_int("port", self.port, 0, 65535)
        _check_int("max_waiting", self.max_waiting, 0, 1_000_000)
        _check_int("drain_timeout", self.drain_timeout, 0, 86_400)
        timeout = self.request_timeout
        if not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout <= 0:
            raise ConfigError(f"request_timeout must be a number of seconds > 0, got {timeout!r}")
        for name in ("served_model_name", "api_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be a non-empty string, got {value!r}; leave it out for none")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")

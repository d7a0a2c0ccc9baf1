"""What a caller may ask of an answer's form: JSON, JSON of a schema, or a regular expression."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from breakgraph.engine.guided_schema import misfits
from breakgraph.errors import ConfigError

MAX_FORM_CHARS = 120_000
"""Of a regular expression, and of a schema as JSON text."""


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams:
    """The form that an answer must have; one of the three. The names are those of vLLM.

    Raises ConfigError for none or several of them, for what is no JSON schema, and for keywords that cannot be kept.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a mapping; kept as text. An object may have other properties than those that the
    schema names, unless it says additionalProperties=false. Where alternatives of oneOf overlap, it means anyOf."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """What the whole answer must match; no look-around, back-references or word boundaries."""

    def __post_init__(self) -> None:
        given = [name for name in ("json", "json_object", "regex") if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(f"guided decoding takes one of json, json_object and regex, got {given or 'none'}")
        if not isinstance(self.json_object, bool):
            raise ConfigError(f"json_object must be True or False, got {self.json_object!r}")
        if self.regex is not None and not isinstance(self.regex, str):
            raise ConfigError(f"regex must be a string, got {self.regex!r}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for kind, text in (("schema", self.schema), ("regex", self.regex)):
            if len(text or "") > MAX_FORM_CHARS:
                raise ConfigError(f"a {kind} has {MAX_FORM_CHARS} characters at most, got {len(text or '')}")

    @property
    def schema(self) -> str | None:
        """The JSON schema as text; None for a regular expression."""
        if self.json_object:
            return '{"type": "object"}'
        assert self.json is None or isinstance(self.json, str), "made text when it was given"
        return self.json


def _schema_text(given: object) -> str:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        if not isinstance(schema, Mapping):
            raise ConfigError(f"a JSON schema must be an object, got {given!r:.200}")
        unkept = list(islice(misfits(schema, "schema"), 5))
        text = json.dumps(schema)
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"a JSON schema must be JSON: {error}") from error
    if unkept:
        raise ConfigError(f"the JSON schema asks for what cannot be kept: {'; '.join(unkept)}")
    return text

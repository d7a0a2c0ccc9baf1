"""What a caller may ask of an answer's form: JSON, JSON of a schema, or a regular expression."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from breakgraph.errors import ConfigError

MAX_GRAMMAR_CHARS = 64 << 10
"""Of a schema as JSON text, or of a regular expression."""

# xgrammar leaves these out without an error: the answer would fit the rest of the schema only.
_NOT_KEPT = frozenset(
    {"contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains"}
    | {"multipleOf", "not", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
)
_OF_SCHEMAS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Keywords that hold schemas by name."""
_OF_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords that hold values, which may look like schemas."""


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
    """What the whole answer must match. No look-around, back-references or word boundaries."""

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
        if len(text := self.schema or self.regex or "") > MAX_GRAMMAR_CHARS:
            raise ConfigError(f"a schema or regex has {MAX_GRAMMAR_CHARS} characters at most, got {len(text)}")

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
        misfits = list(_misfits(schema, "schema"))
        text = json.dumps(schema)
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"a JSON schema must be JSON: {error}") from error
    if misfits:
        raise ConfigError(f"the JSON schema asks for what cannot be kept: {', '.join(misfits[:5])}; leave it out")
    return text


def _misfits(schema: object, path: str) -> Iterator[str]:
    """Where a schema has keywords that an answer might break."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _misfits(item, f"{path}[{index}]")
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        here = f"{path}.{name}"
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            for key, child in value.items():
                yield from _misfits(child, f"{here}.{key}")
        elif name in _NOT_KEPT and value is not False:
            yield here
        elif name == "$ref" and not str(value).startswith("#"):
            yield f"{here} to another document"
        elif name == "allOf" and isinstance(value, list) and len(value) > 1:
            yield f"{here} of several schemas"
        elif name not in _OF_DATA:
            yield from _misfits(value, here)
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        yield f"{path}.pattern beside a length"

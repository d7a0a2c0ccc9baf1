"""Which JSON schemas xgrammar keeps in full. What it leaves out without an error is found here, to be refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NOT_KEPT = frozenset(
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"}
    | {"maxContains", "minContains", "multipleOf", "not", "then", "unevaluatedItems", "unevaluatedProperties"}
    | {"uniqueItems"}
)
_NOTHING_IF_FALSE = frozenset({"unevaluatedItems", "uniqueItems"})
"""Those of them that are kept when they are false."""
_OF_SCHEMAS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
"""Keywords that hold schemas by name."""
_OF_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords that hold values, which may look like schemas."""
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that are all that is looked at in their schema."""
_TYPING = frozenset({"additionalProperties", "items", "prefixItems", "properties"})
"""Keywords that say the type where `type` does not."""
_LENGTHS = frozenset({"maxLength", "minLength"})
_BESIDE_TYPE = _LENGTHS | frozenset(
    {"exclusiveMaximum", "exclusiveMinimum", "format", "maximum", "maxItems", "maxProperties", "minimum", "minItems"}
    | {"minProperties", "pattern", "patternProperties", "propertyNames", "required"}
)
"""Keywords that need a type beside them."""
_TYPES_OF = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
_WRITTEN_CHAR = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|(.))|(["\0-\x1f])', re.DOTALL)


def misfits(schema: object, path: str) -> Iterator[str]:
    """Where a schema asks for what an answer might break, and what to write instead; nothing where all is kept."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from misfits(item, f"{path}[{index}]")
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        here = f"{path}.{name}"
        if name in _OF_SCHEMAS and isinstance(value, Mapping):
            for key, child in value.items():
                yield from misfits(child, f"{here}.{key}")
        elif name in _NOT_KEPT and not (value is False and name in _NOTHING_IF_FALSE):
            yield f"{here} (leave it out)"
        elif name == "$ref" and str(value) != "#" and not str(value).startswith("#/"):
            kind = "by name" if str(value).startswith("#") else "to another document"
            yield f"{here} {kind} (write it as # or #/...)"
        elif name == "allOf" and isinstance(value, list) and len(value) > 1:
            yield f"{here} of several schemas (write them as one)"
        elif name not in _OF_DATA:
            yield from misfits(value, here)
    yield from _unseen(schema, path)
    yield from _of_strings(schema, path)
    yield from _of_objects(schema, path)


def _unseen(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Keywords that have no effect because of others, or for want of a type."""
    whole = next((name for name in _WHOLE if name in schema), None)
    if whole is not None:
        beside = [name for name in schema if name in {*_WHOLE, *_TYPING, *_BESIDE_TYPE, "type"} and name != whole]
        has_values = whole in ("const", "enum")
        if has_values and "type" in beside and _all_fit(schema, whole):
            beside.remove("type")
        way_out = "leave out what does not fit" if has_values else "move it into the schemas that it names or holds"
        yield from (f"{path}.{name} beside {whole} ({way_out})" for name in beside)
    elif schema.get("type", []) == []:
        if "type" in schema or not schema.keys() & _TYPING:
            names = [name for name in schema if name in _BESIDE_TYPE]
            yield from (f"{path}.{name} without a type (add type)" for name in names)
        elif names := [name for name in schema if name in _LENGTHS | {"pattern", "format"}]:
            yield f"{path}.{names[0]} without a type (add type)"


def _all_fit(schema: Mapping[str, Any], whole: str) -> bool:
    """Whether the values of const or enum are all of the type beside them."""
    values = [schema["const"]] if whole == "const" else schema["enum"]
    types = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    return isinstance(values, list) and all(
        types & _TYPES_OF.get(type(value), set())
        or ("integer" in types and isinstance(value, float) and value.is_integer())
        for value in values
    )


def _of_strings(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for one, others in (("pattern", _LENGTHS | {"format"}), ("format", _LENGTHS)):
        if one in schema and schema.keys() & others:
            beside = "a length" if schema.keys() & _LENGTHS else "format"
            yield f"{path}.{one} beside {beside} (leave out one of them)"
    names = schema.get("patternProperties", ())
    for name, pattern in (("pattern", schema.get("pattern")), *(("patternProperties", key) for key in names)):
        if not isinstance(pattern, str):
            continue
        if any(map(_needs_escape, _WRITTEN_CHAR.finditer(pattern))):
            yield f"{path}.{name} with a quote, backslash or control character (leave them out)"


def _needs_escape(written: re.Match[str]) -> bool:
    """Whether a character of a pattern is one that JSON writes with a backslash, which xgrammar would leave out."""
    *codes, escaped, plain = written.groups()
    if plain is not None:
        return True
    if escaped is not None:
        return escaped in '"\\0cfnrtv'
    code = int(next(digits for digits in codes if digits is not None), 16)
    return code < 0x20 or chr(code) in '"\\'


def _of_objects(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(required, list):
        yield f"{path}.required that is no list (name the properties beside it)"
    elif isinstance(properties, Mapping):
        yield from (
            f"{path}.required of {name!r:.50}, which properties does not have (add it there)"
            for name in required
            if name not in properties
        )
    if "patternProperties" in schema and ("properties" in schema or len(schema["patternProperties"]) > 1):
        beside = "beside properties" if "properties" in schema else "of several patterns"
        yield f"{path}.patternProperties {beside} (keep one)"
    if "propertyNames" in schema and schema.keys() & {"patternProperties", "properties"}:
        yield f"{path}.propertyNames beside properties (leave it out)"

"""Guided answers keep to their form, whatever the model would rather say, alone and beside others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xgrammar import GrammarMatcher

from breakgraph import LLM, GuidedDecodingParams, SamplingParams
from breakgraph.engine.guide import NO_TOKEN_FITS
from breakgraph.engine.guided import GrammarCompiler
from breakgraph.engine.sampler import Sampler, unpacked
from breakgraph.errors import ConfigError
from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import ascii_tokenizer, byte_tokenizer
from unit.engine.small import SMALL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(cat|dog)-[0-9]{2,4}"
LONG = 100


@pytest.fixture(scope="module")
def ascii_llm(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models") / "ascii-llama"
    save_tiny_model("llama", folder, eos_token_id=95)
    ascii_tokenizer().save_pretrained(folder)
    with LLM(str(folder), device=str(device), **SMALL) as llm:
        yield llm


def params(guide: GuidedDecodingParams | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LONG, **options}, guided_decoding=guide)


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "tags"}
        and len(value["name"]) <= 5
        and 0 <= value["age"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b", None}
    )


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 2, "min_p": 0.3, "seed": 2},
    {"temperature": 1, "top_p": 0.2, "top_k": 5, "seed": 3},
    {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2},
    {"temperature": 1, "repetition_penalty": 100, "seed": 4, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 0.01},
]


def test_answers_fit_beside_those_that_nobody_guides(ascii_llm: LLM) -> None:
    guides = [GuidedDecodingParams(json=SCHEMA), GuidedDecodingParams(regex=REGEX), None]
    asked = [params(guide, **variant) for variant in VARIANTS for guide in guides]
    outputs = ascii_llm.generate(["tell me"] * len(asked), asked, use_tqdm=False)
    for index, variant in enumerate(VARIANTS):
        schema, regex, free = (output.outputs[0] for output in outputs[3 * index : 3 * index + 3])
        assert schema.finish_reason == regex.finish_reason == "stop", variant
        assert fits_schema(schema.text), (variant, schema.text)
        assert re.fullmatch(REGEX, regex.text), (variant, regex.text)
        alone = ascii_llm.generate("tell me", params(None, **variant), use_tqdm=False)[0].outputs[0]
        assert free.token_ids == alone.token_ids


def test_any_json_object_is_an_object(ascii_llm: LLM) -> None:
    asked = [params(GuidedDecodingParams(json_object=True), seed=seed, max_tokens=110) for seed in range(30)]
    outputs = [output.outputs[0] for output in ascii_llm.generate(["x"] * 30, asked, use_tqdm=False)]
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in whole)
    assert len(whole) > 3
    assert all(output.text.startswith("{") for output in outputs)


def test_other_properties_are_those_of_json_schema(ascii_llm: LLM) -> None:
    """Without additionalProperties=false there may be others: JSON Schema's meaning, not a stricter one."""
    compiler = ascii_llm.engine.grammars
    free = compiler.compile(GuidedDecodingParams(json={"type": "object"})).guide()
    closed = compiler.compile(GuidedDecodingParams(json={"type": "object", "additionalProperties": False})).guide()
    assert ascii_llm.tokenizer is not None
    brace, quote = ascii_llm.tokenizer('{"').input_ids
    for guide in (free, closed):
        guide.accept(brace)
    assert [bool(unpacked(g.allowed()[None], 96)[0, quote]) for g in (free, closed)] == [True, False]


def test_an_answer_goes_on_where_it_was_after_a_preemption(ascii_llm: LLM) -> None:
    asked = [params(GuidedDecodingParams(json=SCHEMA), seed=seed) for seed in range(8)]
    wanted = [output.outputs[0].text for output in ascii_llm.generate(["p" * 60] * 8, asked, use_tqdm=False)]
    # As many blocks as five requests have at the end.
    small = {**SMALL, "num_gpu_blocks_override": 30, "enable_prefix_caching": False}
    with LLM(ascii_llm.config.model, device=ascii_llm.config.device, **small) as llm:
        found = [output.outputs[0].text for output in llm.generate(["p" * 60] * 8, asked, use_tqdm=False)]
        assert llm.stats()["num_preemptions"] > 0
    assert found == wanted
    assert all(map(fits_schema, found))


def test_an_answer_without_a_token_that_fits_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    """The vocabulary has no brace, and no z."""
    save_tiny_model("llama", tmp_path, eos_token_id=94)
    byte_tokenizer().save_pretrained(tmp_path)
    with LLM(str(tmp_path), device="cpu", **SMALL) as llm:
        asked = [params(GuidedDecodingParams(regex="abz+"), temperature=0), params(None, temperature=0)]
        given_up, free = (output.outputs[0] for output in llm.generate(["a", "a"], asked, use_tqdm=False))
        assert (given_up.finish_reason, given_up.stop_reason) == ("abort", NO_TOKEN_FITS)
        assert free.token_ids == llm.generate("a", asked[1], use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(ConfigError, match="no token of the vocabulary can begin"):
            llm.generate("a", params(GuidedDecodingParams(json_object=True)), use_tqdm=False)
        stats = llm.stats()
        assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


def test_a_grammar_that_somebody_holds_is_not_compiled_again(ascii_llm: LLM) -> None:
    compiler = ascii_llm.engine.grammars
    first = compiler.compile(GuidedDecodingParams(json=SCHEMA))
    assert compiler.compile(GuidedDecodingParams(json=json.dumps(SCHEMA))) is first
    assert compiler.compile(GuidedDecodingParams(regex=REGEX)) is not first


def test_masks_are_read_bit_by_bit() -> None:
    bits = torch.tensor([[1, -(2**31)], [6, 0]], dtype=torch.int32)
    found = [row.nonzero().flatten().tolist() for row in unpacked(bits, 64)]
    assert found == [[0, 63], [1, 2]]
    assert unpacked(bits, 40).shape == (2, 40)


def test_masked_rows_get_the_best_token_that_is_allowed() -> None:
    logits = torch.arange(40.0).repeat(3, 1)
    masks = {0: torch.tensor([1 << 5 | 1 << 7, 0], dtype=torch.int32), 2: torch.tensor([-1, 1], dtype=torch.int32)}
    greedy = [SamplingParams(temperature=0)] * 3
    assert Sampler(torch.device("cpu"), 0).draw(logits, greedy, [None] * 3, masks=masks).wait() == [7, 39, 32]
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "takes one of json, json_object and regex, got none"),
        ({"regex": "a", "json_object": True}, r"got \['json_object', 'regex'\]"),
        ({"json": "{"}, "must be JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": {"a": {1}}}, "must be JSON"),
        ({"json": {"type": "integer", "multipleOf": 3}}, r"schema\.multipleOf"),
        ({"json": {"properties": {"not": {"not": {}}}}}, r"schema\.properties\.not\.not"),
        ({"json": {"anyOf": [{}, {"uniqueItems": True}]}}, r"schema\.anyOf\[1\]\.uniqueItems"),
        ({"json": {"$ref": "https://example.com/schema"}}, "to another document"),
        ({"json": {"allOf": [{}, {}]}}, "of several schemas"),
        ({"json": {"type": "string", "pattern": "a", "maxLength": 3}}, "pattern beside a length"),
        ({"json_object": 1}, "must be True or False"),
        ({"regex": 3}, "must be a string"),
        ({"regex": "a" * 120_001}, "a regex has 120000 characters at most, got 120001"),
        ({"json": {"title": "a" * 120_000}}, "a schema has 120000 characters at most, got 120013"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuidedDecodingParams(**options)


OBJECT = {"type": "object", "properties": {"a": {}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**OBJECT, "anyOf": [{"type": "object"}]}, r"schema\.required beside anyOf \(move it into"),
        ({**OBJECT, "$ref": "#/$defs/a", "$defs": {"a": {}}}, r"schema\.properties beside \$ref"),
        ({"allOf": [{"type": "integer"}], "minimum": 5}, r"schema\.minimum beside allOf"),
        ({"oneOf": [{}], "anyOf": [{}]}, r"schema\.oneOf beside anyOf"),
        ({"type": "object", "required": ["b"]}, r"schema\.required of 'b', which properties does not have \(add it"),
        ({"items": {"type": "string", "required": True}}, r"schema\.items\.required that is no list"),
        ({"minimum": 5}, r"schema\.minimum without a type \(add type\)"),
        ({"pattern": "^x$"}, r"schema\.pattern without a type"),
        ({"type": [], "properties": {"a": {}}, "minProperties": 1}, r"schema\.minProperties without a type"),
        ({"propertyNames": {"type": "string"}}, r"schema\.propertyNames without a type"),
        ({"type": "string", "format": "date", "maxLength": 3}, r"schema\.format beside a length"),
        ({"type": "string", "format": "date", "pattern": "^x$"}, r"schema\.pattern beside format"),
        ({"type": "string", "enum": ["a", 1]}, r"schema\.type beside enum \(leave out what does not fit"),
        ({"type": ["integer", "null"], "const": "x"}, r"schema\.type beside const"),
        ({"type": "integer", "const": True}, r"schema\.type beside const"),
        ({"enum": ["a", "bcd"], "maxLength": 1}, r"schema\.maxLength beside enum"),
        ({"const": 1, "enum": [2]}, r"schema\.enum beside const"),
        ({"$ref": "#foo"}, r"schema\.\$ref by name \(write it as # or #/"),
        ({"properties": {}, "unevaluatedProperties": False}, r"schema\.unevaluatedProperties"),
        ({"properties": {}, "patternProperties": {"a": {}}}, r"schema\.patternProperties beside properties"),
        ({"type": "object", "patternProperties": {"a+": {}, "a*": {}}}, r"schema\.patternProperties of several"),
        ({"properties": {}, "propertyNames": {"type": "string"}}, r"schema\.propertyNames beside properties"),
        ({"type": "string", "pattern": 'a"'}, "pattern with a quote, backslash or control"),
        ({"type": "string", "pattern": r"a\\b"}, "pattern with a quote, backslash or control"),
        ({"type": "string", "pattern": r"a\x22"}, "pattern with a quote, backslash or control"),
        ({"type": "object", "patternProperties": {r"a\n": {}}}, "patternProperties with a quote, backslash or control"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_of_a_schema_would_be_left_out(schema: dict[str, Any], message: str) -> None:
    for given, path in ((schema, "schema"), ({"type": "array", "items": schema}, r"schema\.items")):
        with pytest.raises(ConfigError, match=message.replace("schema", path, 1) if "schema" in message else message):
            GuidedDecodingParams(json=given)


KEPT: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"anyOf": [{"type": "integer"}], "title": "a", "default": "x"}, ["1"], ['"x"']),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}}, ["null"], ["1"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"b"', "1"]),
    ({"type": "integer", "const": 2.0}, ["2"], ["1"]),
    ({"type": ["integer", "null"], "minimum": 5}, ["7", "null"], ["1"]),
    ({"type": ["object", "null"], "properties": {"b": {}}, "required": ["b"]}, ["null", '{"b": 1}'], ["{}"]),
    ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, ['{"a": 1}'], ["{}", '{"a": "x"}', "1"]),
    ({"additionalProperties": {"type": "null"}, "minProperties": 1}, ['{"a": null}'], ["{}", '{"a": 1}']),
    ({"items": {"type": "integer"}, "minItems": 2}, ["[1, 2]"], ["[1]", '["x", "y"]', "{}"]),
    ({"prefixItems": [{"type": "integer"}], "maxItems": 1}, ["[1]"], ['["x"]', "[1, 2]"]),
    ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
    ({"type": "string", "format": "date"}, ['"2020-01-01"'], ['"a"']),
    ({"type": "string", "pattern": r"^[^\d]\.\u0061$"}, ['"b.a"'], ['"".a"', '"1.a"', '"bxa"']),
    ({"type": "object", "patternProperties": {"^b$": {"type": "null"}}}, ['{"b": null}'], ['{"b": 1}']),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "minProperties": 1}, ['{"a": 1}'], ["{}", '{"b": 1}']),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": []}, ['{"a": {}}'], ['{"a": 1}']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT, ids=lambda value: str(value)[:60])
def test_what_is_taken_is_kept(ascii_llm: LLM, schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert ascii_llm.tokenizer is not None
    compiled = ascii_llm.engine.grammars._compiled(GuidedDecodingParams(json=schema))
    for text in (*good, *bad):
        matcher = GrammarMatcher(compiled)
        took = all(map(matcher.accept_token, ascii_llm.tokenizer(text).input_ids)) and matcher.accept_token(95)
        assert took == (text in good), text


def test_values_that_look_like_keywords_are_left_alone() -> None:
    GuidedDecodingParams(json={"default": [{"not": 1}], "properties": {"not": {}, "if": {"const": {"if": 2}}}})


def test_a_guided_answer_ends_at_its_end() -> None:
    with pytest.raises(ConfigError, match="ignore_eos goes on"):
        params(GuidedDecodingParams(regex="a"), ignore_eos=True)
    with pytest.raises(ConfigError, match="must be GuidedDecodingParams"):
        SamplingParams(guided_decoding="a+")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (GuidedDecodingParams(regex="("), "the regex cannot be used: Regex parsing error"),
        (GuidedDecodingParams(regex=r"\bword"), "Word boundary is not supported"),
        (GuidedDecodingParams(json={"type": "robot"}), 'the JSON schema cannot be used: Unsupported type "robot"'),
        (GuidedDecodingParams(json={"$ref": "#/gone"}), "Cannot find field 'gone'"),
    ],
)
def test_what_cannot_be_compiled(ascii_llm: LLM, guide: GuidedDecodingParams, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ascii_llm.generate("a", params(guide), use_tqdm=False)


def test_what_guiding_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = GuidedDecodingParams(regex="a")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        GrammarCompiler(None, 96, [94]).compile(guide)
    with pytest.raises(ConfigError, match="needs an end-of-sequence token"):
        GrammarCompiler(byte_tokenizer(), 96, []).compile(guide)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install 'breakgraph\[guided\]'"):
        GrammarCompiler(byte_tokenizer(), 96, [94]).compile(guide)

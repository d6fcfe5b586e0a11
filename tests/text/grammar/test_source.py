import json
from typing import Any

import pytest

from localllm.errors import UsageError
from localllm.request import MAX_GRAMMAR_LEN, MAX_SCHEMA_DEPTH, MAX_SCHEMA_LEN, Grammar, GrammarKind
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.source import compile_source

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


def refusal(kind: str, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        compile_source(Grammar(kind, text))  # pyright: ignore[reportArgumentType]
    return str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"uniqueItems": True},
        {"contains": {}},
        {"minContains": 1},
        {"dependentSchemas": {}},
        {"dependentRequired": {}},
        {"dependencies": {}},
        {"if": {}},
        {"propertyNames": {}},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": False},
        {"$dynamicRef": "#a"},
        {"nullable": True},
        {"minlength": 3},
        {"x-guidance": {"lenient": True}},
        {"minProperties": 3},
        {"minimum": 2**60},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "other.json#/a"},
        {"$id": "https://example.com/part.json"},
    ],
)
def test_unsupported_keywords_are_rejected_with_their_location(schema: dict[str, Any]) -> None:
    [keyword] = schema
    whole = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, schema]}}}
    assert f"{keyword} at #/properties/a~1b/anyOf/1 " in refusal("json_schema", json.dumps(whole))


def test_a_property_may_be_called_like_a_keyword() -> None:
    compile_source(
        Grammar("json_schema", '{"type": "object", "properties": {"not": {"type": "string"}, "if": {}}}')
    )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "type at #/items is wrong: 'strin'"),
        ({"type": "string", "format": "iban"}, "Unknown format: iban (at #/items)"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "["}, "pattern at #/items is wrong"),
        ({"$ref": "#/$defs/none"}, "Pointer '/$defs/none' does not exist"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf may overlap"),
        ({"type": "string", "minLength": 10**400}, "cannot be read: number out of range"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf at #/items is wrong"),
    ],
)
def test_invalid_schemas_are_located(schema: Any, said: str) -> None:
    assert said in refusal("json_schema", json.dumps({"type": "array", "items": schema}))


@pytest.mark.parametrize("part", [{"minProperties": "x"}, {"$ref": 5}, {"required": 3, "type": "object"}])
def test_values_unchecked_by_an_old_draft_are_rejected(part: dict[str, Any]) -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "$defs": {"a": part}, "$ref": "#/$defs/a"}
    assert "of the wrong type" in refusal("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "which nothing satisfies"),
        ({"enum": []}, "anyOf is empty"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no integer"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5) is greater"),
        ({"type": "array", "minItems": 5, "maxItems": 3}, "minItems (5) is greater"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"type": "string", "const": 1}, "incompatible types"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "Regex is empty"),
        ({"$ref": "#"}, "requires itself"),
        (NODE | {"$defs": {"node": NODE}}, "#/$defs/node requires itself"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "requires itself"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "requires itself"),
    ],
)
def test_unsatisfiable_schemas_are_rejected_by_name(schema: Any, said: str) -> None:
    assert said in refusal("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}},
    ],
)
def test_finite_recursion_is_supported(schema: Any) -> None:
    compile_source(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "a(", "cannot be used: unclosed group"),
        ("regex", "[z-a]", "cannot be used: invalid character class range"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: foo", "line 1, column 8: unknown name"),
        ("lark", 'begin: "a"', "no start rule"),
        ("lark", "start[temperature=0.5]: /a+/", "sets temperature"),
        ("gbnf", 'answer ::= "a"', "No 'root' rule"),
        ("gbnf", "root ::= other", "Rule 'other' not found"),
        ("gbnf", "root ::= <[12]>", "Expected name"),
        ("gbnf", f"root ::= {'(' * 900}'a'{')' * 900}", "nested too deeply"),
        ("regex", "x" * (MAX_GRAMMAR_LEN + 1), "limit"),
        ("json_schema", f'{{"title": "{"x" * MAX_SCHEMA_LEN}"}}', "limit"),
        ("json_schema", '{"items":' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH, "nested more than"),
        ("json_schema", "{]", "is not JSON"),
        ("json_schema", '{"minimum": NaN}', "NaN is not JSON"),
        ("json_schema", "[]", "give an object"),
        ("choice", "[]", "give a list"),
        ("choice", '["a", ""]', "give a list"),
        ("choice", '["\\ud800"]', "surrogate"),
        ("json", "{}", "json has none"),
        ("yaml", "a", "no grammar of the kind 'yaml'"),
    ],
)
def test_other_grammars_are_refused_with_the_reason(kind: str, text: str, said: str) -> None:
    assert said in refusal(kind, text)


def test_a_long_chain_of_names_does_not_end_the_process(grammars: GrammarCompiler) -> None:
    """The compiler follows it recursively, which overflows a normal stack."""
    count = 1500
    rules = "".join(f'a{i}: a{i + 1} "x"\n' for i in range(count))
    parts = {f"{i}": {"$ref": f"#/$defs/{i + 1}", "minLength": 1} for i in range(2 * count)}
    schema = {"$ref": "#/$defs/0", "$defs": parts | {f"{2 * count}": {"type": "string"}}}
    for grammar in (
        Grammar(GrammarKind.LARK, f'start: a0\n{rules}a{count}: "a"'),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":"))),
    ):
        assert grammars.follow(grammar).begin([])()[0] is not None

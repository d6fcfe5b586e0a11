"""Arguments that a model's markup has one by one (`text/output/spelling.py`): a text as it is, all else as JSON.

A router reads what it finds by the parameter's schema. So what is written must be of a kind that comes back as it
was meant: where a text could be taken for a number, say, the schema is refused. Truth values may be Python's: some
templates write them so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError
from localllm.text.grammar.endless import resolve_pointer
from localllm.text.grammar.functions import FUNCTION_NAME
from localllm.text.grammar.schema import ANNOTATION_KEYWORDS
from localllm.text.grammar.spelled import quote
from localllm.text.output.spelling import ParameterSyntax
from localllm.text.output.values import parse_typed

SCALAR_TYPES = frozenset(("boolean", "integer", "number", "null"))
JSON_TYPES = SCALAR_TYPES | {"string", "array", "object"}
ROOT_KEYWORDS = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    *ANNOTATION_KEYWORDS,
)
STRING_KEYWORDS = ("type", "minLength", "maxLength", *ANNOTATION_KEYWORDS)
SIMPLER_SCHEMA = "make it simpler, or leave it to the model to call"
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolParameter:
    """One of them. At least one of `text` and `schema` is there."""

    name: str
    required: bool
    text_pattern: str | None
    """What a text that stands as it is may be, in Lark, for a terminal; None: it may be none."""

    json_schema: str | None
    """Of a value that is written as JSON; None: it may not be."""


def parse_parameters(schema: Mapping[str, Any], form: ParameterSyntax) -> list[ToolParameter]:
    """Of a function, in the order of its schema. Further ones that the schema allows are not written.

    Raises UsageError, with the parameter, for what this markup cannot say or a router would read as another value.
    """
    if odd := next((word for word in schema if word not in ROOT_KEYWORDS and not word.startswith("x-")), None):
        raise UsageError(
            f"the schema's {odd} at # is not supported in the markup of this model's calls", SIMPLER_SCHEMA
        )
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := next((key for key in required if key not in properties), None):
        raise UsageError(f"the parameter {missing} is required, and is not among the properties", "add it")
    if odd := next((key for key in properties if not FUNCTION_NAME.fullmatch(key)), None):
        raise UsageError(f"the parameter {odd!r} cannot be written in this model's markup", "give it another name")
    return [_parameter(key, part, schema, form, required=key in required) for key, part in properties.items()]


def _parameter(
    key: str, part: Any, root: Mapping[str, Any], form: ParameterSyntax, *, required: bool
) -> ToolParameter:
    whole = _resolved(part, root)
    kinds = _kinds(whole, root)
    if form.text_before is None or "string" not in kinds:
        if form.scalars_only and not kinds <= SCALAR_TYPES:
            raise _refusal(key, "a list or an object")
        as_python = form.text_before is not None and not form.marks_text and whole == {**whole, "type": "boolean"}
        text = '"True" | "False"' if as_python and _words(whole) == {"type"} else None
        return ToolParameter(key, required, text, _alone(part, root))
    text = _text(key, part, whole, kinds, form)
    both = form.marks_text and "null" in kinds
    return ToolParameter(key, required, text, '{"type": "null"}' if both else None)


def _text(key: str, part: Any, whole: Any, kinds: frozenset[str], form: ParameterSyntax) -> str:
    """What the text of such a parameter may be."""
    words = _words(whole)
    if not words:
        return "ANY"
    literals = whole.get("enum", [whole["const"]] if "const" in whole else [])
    if literals and all(isinstance(text, str) for text in literals):
        if not form.marks_text and (
            wrong := next((text for text in literals if parse_typed(text, part) != text), None)
        ):
            raise _refusal(key, f"the text {wrong!r}, which reads as another value")
        return " | ".join(quote(text) if text else "/(?s:.{0})/" for text in literals)
    if whole.get("type") == "string" and words <= {*STRING_KEYWORDS} and (form.marks_text or whole is part):
        low, high = whole.get("minLength", 0), whole.get("maxLength", "")
        return "ANY" if words == {"type"} else f"/(?s:.{{{low},{high}}})/"
    members = [whole, *whole.get("anyOf", ())]
    if kinds <= {"string", "null"} and all(_words(member) <= {"type", "anyOf"} for member in members):
        return "ANY"
    raise _refusal(key, "a text of this kind, or else")


def _words(schema: Any) -> set[str]:
    """Keywords that restrict something."""
    found = schema if isinstance(schema, Mapping) else {}
    return {word for word in found if word not in ANNOTATION_KEYWORDS and not word.startswith("x-")}


def _refusal(key: str, what: str) -> UsageError:
    return UsageError(
        f"the parameter {key} may be {what}, which this model's markup cannot say surely", SIMPLER_SCHEMA
    )


def _alone(part: Any, root: Mapping[str, Any]) -> str:
    """The schema of a parameter, with what it refers to."""
    shared = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    return json.dumps({**shared, **part} if isinstance(part, Mapping) else part)


def _resolved(part: Any, root: Mapping[str, Any]) -> Any:
    """What a chain of references leads to."""
    seen: set[str] = set()
    while isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and len(_words(part)) == 1:
        pointer = part["$ref"]
        if pointer in seen:
            break
        seen.add(pointer)
        part = resolve_pointer(root, pointer)
    return part


def _kinds(part: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have, or more than those."""
    part = _resolved(part, root)
    if not isinstance(part, Mapping) or depth > 8:
        return JSON_TYPES
    named = part.get("type", list(JSON_TYPES))
    found = frozenset([named] if isinstance(named, str) else named)
    for word in ("anyOf", "oneOf"):
        if word in part:
            found &= frozenset().union(*(_kinds(member, root, depth + 1) for member in part[word]))
    for member in part.get("allOf", ()):
        found &= _kinds(member, root, depth + 1)
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None:
        found &= {_NAMES.get(type(value), "null") for value in values} | {"number"}
    return found

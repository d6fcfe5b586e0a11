"""Arguments that a model's markup lists one by one (`text/output/spelling.py`): strings verbatim, others as JSON.

A parser interprets each value by the parameter's schema, so written values must parse back unchanged: a schema for
which, for example, a string could be mistaken for a number is rejected. Booleans may use Python's spelling, as
some templates do.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError
from localllm.text.grammar.functions import FUNCTION_NAME
from localllm.text.grammar.schema import ANNOTATION_KEYWORDS, resolve_pointer
from localllm.text.output.calls import parse_typed
from localllm.text.output.spelling import ParameterSyntax

# Markup texts in Lark: as control tokens if the model has them, otherwise as characters.


class MarkupWriter:
    """`literals`: markup that may be or contain control tokens; `token_of`: returns the control token with this
    text, if there is one.
    """

    def __init__(self, literals: Collection[str], token_of: Callable[[str], int | None]):
        found = {literal: token_of(literal) for literal in literals if literal}
        self._tokens = {literal: token for literal, token in found.items() if token is not None}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._parts = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def literal(self, text: str) -> str:
        """Return the Lark form of exactly this text; empty for an empty text."""
        parts = filter(None, self._parts.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quote(part) for part in parts)

    def control_tokens(self, literals: Collection[str]) -> list[str]:
        """Return those literals that are control tokens."""
        return [f"<[{self._tokens[literal]}]>" for literal in literals if literal in self._tokens]

    def text_until(self, rule: str, body: str, text: str) -> list[str]:
        """Return rules for a match of the terminal `body` followed by the first occurrence of the text."""
        first, *rest = self._parts.split(text)
        if not rest:
            return [f"{rule}[suffix={quote(text)}]: {body}"]
        # Characters cannot match a control token, so the longest match ends right before it.
        letters = f"{rule.upper()}: {body} {quote(first)}" if first else f"{rule.upper()}: {body}"
        return [f"{rule}: {rule.upper()} {self.literal(''.join(rest))}", letters]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
    """One parameter. At least one of `text_pattern` and `json_schema` is set."""

    name: str
    required: bool
    text_pattern: str | None
    """Lark pattern of a verbatim string, for a terminal; None if not allowed."""

    json_schema: str | None
    """Schema of a value written as JSON; None if not allowed."""


def parse_parameters(schema: Mapping[str, Any], syntax: ParameterSyntax) -> list[ToolParameter]:
    """Return a function's parameters in its schema's order. Additional ones that the schema allows are not
    generated.

    Raises UsageError, with the parameter, for what this markup cannot express or a parser would read as another
    value.
    """
    if unsupported := next(
        (word for word in schema if word not in ROOT_KEYWORDS and not word.startswith("x-")), None
    ):
        raise UsageError(
            f"the schema's {unsupported} at # is not supported in the markup of this model's calls", SIMPLER_SCHEMA
        )
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := next((key for key in required if key not in properties), None):
        raise UsageError(f"the parameter {missing} is required, but is not among the properties", "add it")
    if unsupported := next((key for key in properties if not FUNCTION_NAME.fullmatch(key)), None):
        raise UsageError(
            f"the parameter {unsupported!r} cannot be written in this model's markup", "give it another name"
        )
    return [_parameter(key, part, schema, syntax, required=key in required) for key, part in properties.items()]


def _parameter(
    key: str, part: Any, root: Mapping[str, Any], syntax: ParameterSyntax, *, required: bool
) -> ToolParameter:
    resolved = _resolved(part, root)
    kinds = _kinds(resolved, root)
    if syntax.text_before is None or "string" not in kinds:
        if syntax.scalars_only and not kinds <= SCALAR_TYPES:
            raise _refusal(key, "a list or an object")
        as_python = (
            syntax.text_before is not None
            and not syntax.marks_text
            and resolved == {**resolved, "type": "boolean"}
        )
        text = '"True" | "False"' if as_python and _words(resolved) == {"type"} else None
        return ToolParameter(key, required, text, _alone(part, root))
    text = _text(key, part, resolved, kinds, syntax)
    nullable = syntax.marks_text and "null" in kinds
    return ToolParameter(key, required, text, '{"type": "null"}' if nullable else None)


def _text(key: str, part: Any, resolved: Any, kinds: frozenset[str], syntax: ParameterSyntax) -> str:
    """Return the pattern of such a parameter's text."""
    words = _words(resolved)
    if not words:
        return "ANY"
    literals = resolved.get("enum", [resolved["const"]] if "const" in resolved else [])
    if literals and all(isinstance(text, str) for text in literals):
        if not syntax.marks_text and (
            ambiguous := next((text for text in literals if parse_typed(text, part) != text), None)
        ):
            raise _refusal(key, f"the text {ambiguous!r}, which reads as another value")
        return " | ".join(quote(text) if text else "/(?s:.{0})/" for text in literals)
    if (
        resolved.get("type") == "string"
        and words <= {*STRING_KEYWORDS}
        and (syntax.marks_text or resolved is part)
    ):
        low, high = resolved.get("minLength", 0), resolved.get("maxLength", "")
        return "ANY" if words == {"type"} else f"/(?s:.{{{low},{high}}})/"
    members = [resolved, *resolved.get("anyOf", ())]
    if kinds <= {"string", "null"} and all(_words(member) <= {"type", "anyOf"} for member in members):
        return "ANY"
    raise _refusal(key, "a text of this kind or another value")


def _words(schema: Any) -> set[str]:
    """Return keywords that restrict values."""
    found = schema if isinstance(schema, Mapping) else {}
    return {word for word in found if word not in ANNOTATION_KEYWORDS and not word.startswith("x-")}


def _refusal(key: str, what: str) -> UsageError:
    return UsageError(
        f"the parameter {key} may be {what}, which this model's markup cannot express unambiguously",
        SIMPLER_SCHEMA,
    )


def _alone(part: Any, root: Mapping[str, Any]) -> str:
    """Return a parameter's schema with the definitions it refers to."""
    shared = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    return json.dumps({**shared, **part} if isinstance(part, Mapping) else part)


def _resolved(part: Any, root: Mapping[str, Any]) -> Any:
    """Follow a chain of references."""
    seen: set[str] = set()
    while isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and len(_words(part)) == 1:
        pointer = part["$ref"]
        if pointer in seen:
            break
        seen.add(pointer)
        part = resolve_pointer(root, pointer)
    return part


def _kinds(part: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a value may have, or a superset."""
    part = _resolved(part, root)
    if not isinstance(part, Mapping) or depth > 8:
        return JSON_TYPES
    named = part.get("type", list(JSON_TYPES))
    kinds = frozenset([named] if isinstance(named, str) else named)
    for word in ("anyOf", "oneOf"):
        if word in part:
            kinds &= frozenset().union(*(_kinds(member, root, depth + 1) for member in part[word]))
    for member in part.get("allOf", ()):
        kinds &= _kinds(member, root, depth + 1)
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None:
        kinds &= {_NAMES.get(type(value), "null") for value in values} | {"number"}
    return kinds

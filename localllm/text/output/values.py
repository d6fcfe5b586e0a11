"""Argument values that are not written as JSON: Python literals, Gemma's quotes, and text with a schema."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.text.output.reader import MalformedCall, TextReader

StringReader = Callable[[TextReader], str | None]

_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD = re.compile(r"[^\s,:=(){}\[\]]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def read_python_string(reader: TextReader) -> str | None:
    """Return the next string in single or double quotes, if any. Escapes that Python does not define are kept."""
    quoted = reader.read_match(_QUOTED)
    return None if quoted is None else _ESCAPE.sub(_unescape, quoted[1:-1])


def read_gemma_string(reader: TextReader) -> str | None:
    """Return the next string between Gemma's quote tokens, if any. It contains no escapes."""
    return reader.read_until('<|"|>') if reader.accept('<|"|>') else None


def read_value(reader: TextReader, string: StringReader) -> Any:
    """Parse a value in Python's or Gemma's notation, with the given reader for strings. Raises MalformedCall."""
    text = string(reader)
    if text is not None:
        return text
    if reader.accept("{"):
        return _pairs(reader, string)
    for opening, closing in ("[]", "()"):
        if reader.accept(opening):
            return _items(reader, string, closing)
    word = _word(reader)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    number = parse_json_or_text(word)
    if isinstance(number, int | float):
        return number
    raise MalformedCall(f"{word} is not a value")


def parse_typed(text: str, schema: Any) -> Any:
    """Return the value of a parameter written as bare text, by its schema; without one, parsed as JSON if valid.

    Text that does not match its schema remains text, so that the function's caller can tell the model.
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    parsed = _CONSTANTS[text] if text in _CONSTANTS else parse_json_or_text(text)
    kind = _TYPES.get(type(parsed), "string")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return parsed if kind != "string" and fits else text


def parse_json_or_text(text: str) -> Any:
    """Return the JSON value, or the text itself if it is not JSON."""
    reader = TextReader(text)
    try:
        parsed = reader.read_json()
    except MalformedCall:
        return text
    return parsed if reader.at_end() else text


def _pairs(reader: TextReader, string: StringReader) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    while not reader.accept("}"):
        key = string(reader)
        key = _word(reader) if key is None else key
        reader.expect(":")
        pairs[key] = read_value(reader, string)
        if not reader.accept(","):
            reader.expect("}")
            break
    return pairs


def _items(reader: TextReader, string: StringReader, closing: str) -> list[Any]:
    items: list[Any] = []
    while not reader.accept(closing):
        items.append(read_value(reader, string))
        if not reader.accept(","):
            reader.expect(closing)
            break
    return items


def _word(reader: TextReader) -> str:
    word = reader.read_match(_WORD)
    if word is None:
        raise MalformedCall(f"no word at {reader.position}")
    return word


def _unescape(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    return (
        chr(int(code, 16)) if code else _ESCAPES.get(escape[3], escape[3] if escape[3] in "\\'\"" else escape[0])
    )


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; empty if unspecified."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(filter(_is_text, named if isinstance(named, list) else []))
    for word in ("anyOf", "oneOf"):
        members = schema.get(word)
        member_types = [_types(member) for member in members] if isinstance(members, list) else []
        if not all(member_types):
            return set()
        types = types.union(*member_types)
    allowed = schema.get("enum")
    if not types and isinstance(allowed, list):
        types = {_TYPES.get(type(one), "string") for one in allowed}
    return types


def _is_text(name: object) -> bool:
    return isinstance(name, str)


def dump_arguments(arguments: dict[str, Any]) -> str:
    """Return JSON text. A lone surrogate, which JSON can express but UTF-8 cannot encode, remains escaped."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments)
    return text

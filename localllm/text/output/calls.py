"""Parses tool calls as models write them into `ToolCall`s: one function per notation.

Each function parses the whole text between the markup of `formats.py`, and raises MalformedCall for anything else.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.request import ToolCall
from localllm.text.output.reader import MalformedCall, TextReader

StringReader = Callable[[TextReader], str | None]

_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_WORD = re.compile(r"[^\s,:=(){}\[\]]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
ToolCalls = list[ToolCall]
CallReader = Callable[[TextReader], ToolCalls]
_NAME = re.compile(r"[\w.\-]+")


def read_json_calls(reader: TextReader) -> ToolCalls:
    """Parse `{"name": ..., "arguments": {...}}`, a list of those, or several in sequence."""
    calls: ToolCalls = []
    while not reader.at_end():
        parsed = reader.read_json()
        calls += map(_from_json, parsed if isinstance(parsed, list) else [parsed])
        reader.accept(";")
    return calls


def read_mistral(reader: TextReader) -> ToolCalls:
    """Parse a JSON list of calls, or repeated `name[CALL_ID]id[ARGS]{...}`."""
    if reader.accept("["):
        reader.position -= 1
        return read_json_calls(reader)
    calls: ToolCalls = []
    while not reader.at_end():
        name = _name(reader)
        call_id = _name(reader) if reader.accept("[CALL_ID]") else ""
        reader.accept("[ARGS]")
        calls.append(_call(name, reader.read_json(), call_id))
        reader.accept("[TOOL_CALLS]")
    return calls


def read_qwen_functions(reader: TextReader) -> ToolCalls:
    """Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>`, with line breaks around the
    value.
    """
    calls: ToolCalls = []
    while not reader.at_end():
        reader.expect("<function=")
        name, arguments = reader.read_until(">"), {}
        while reader.accept("<parameter="):
            key = reader.read_until(">")
            text = reader.read_until("</parameter>", before=("<parameter=", "</function>"))
            arguments[key] = _typed(reader, name, key, text.removeprefix("\n").removesuffix("\n"))
        reader.expect("</function>")
        calls.append(_call(name, arguments))
    return calls


def read_functionary(reader: TextReader) -> ToolCalls:
    """Functionary 3.1: `name>{...}`."""
    name = reader.read_until(">")
    return [_call(name, reader.read_json())]


def invocation_reader(prefix: str) -> CallReader:
    """`<invoke name="f"><parameter name="key" string="true">value</parameter></invoke>`, with prefixed tags."""

    def read(reader: TextReader) -> ToolCalls:
        calls: ToolCalls = []
        end = f"</{prefix}invoke>"
        while not reader.at_end():
            reader.expect(f'<{prefix}invoke name="')
            name, arguments = reader.read_until('">'), {}
            while reader.accept(f'<{prefix}parameter name="'):
                key, _, string = reader.read_until('">').partition('" string="')
                text = reader.read_until(f"</{prefix}parameter>", before=(f"<{prefix}parameter", end))
                arguments[key] = {"true": text, "false": parse_json_or_text(text)}.get(
                    string, _typed(reader, name, key, text)
                )
            reader.expect(end)
            calls.append(_call(name, arguments))
        return calls

    return read


def read_glm(reader: TextReader) -> ToolCalls:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`"""
    name, arguments = _name(reader), {}
    while reader.accept("<arg_key>"):
        key = reader.read_until("</arg_key>")
        reader.expect("<arg_value>")
        arguments[key] = _typed(reader, name, key, reader.read_until("</arg_value>", before=("<arg_key>",)))
    return [_call(name, arguments)]


def read_deepseek(reader: TextReader) -> ToolCalls:
    """V3: `function<｜tool▁sep｜>name`, then JSON in a code block; V3.1: `name<｜tool▁sep｜>` and plain JSON."""
    calls: ToolCalls = []
    while not reader.at_end():
        reader.expect("<｜tool▁call▁begin｜>")
        name = reader.read_until("<｜tool▁sep｜>")
        fenced = not reader.accept("{")
        reader.position -= not fenced
        name = reader.read_until("\n```json\n") if fenced else name
        calls.append(_call(name, reader.read_json()))
        if fenced:
            reader.expect("```")
        reader.expect("<｜tool▁call▁end｜>")
    return calls


def read_kimi(reader: TextReader) -> ToolCalls:
    """`functions.name:0<|tool_call_argument_begin|>{...}`; the text before the JSON is also the call's id."""
    calls: ToolCalls = []
    while not reader.at_end():
        reader.expect("<|tool_call_begin|>")
        call_id = reader.read_until("<|tool_call_argument_begin|>").strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        calls.append(_call(name, reader.read_json(), call_id))
        reader.expect("<|tool_call_end|>")
    return calls


def read_gemma(reader: TextReader) -> ToolCalls:
    """`call:name{key:<|"|>text<|"|>,other:3}`"""
    reader.expect("call:")
    return [_call(_name(reader), read_value(reader, read_gemma_string))]


def read_pythonic(reader: TextReader) -> ToolCalls:
    """`[name(key="text", other=3), name()]`"""
    calls: ToolCalls = []
    reader.expect("[")
    while not reader.accept("]"):
        name, arguments = _name(reader), {}
        reader.expect("(")
        while not reader.accept(")"):
            key = _name(reader)
            reader.expect("=")
            arguments[key] = read_value(reader, read_python_string)
            if not reader.accept(","):
                reader.expect(")")
                break
        calls.append(_call(name, arguments))
        if not reader.accept(","):
            reader.expect("]")
            break
    return calls


def read_harmony_arguments(name: str, reader: TextReader) -> ToolCalls:
    """Parse the JSON arguments in a message to this function."""
    return _only(reader, [_call(name, reader.read_json())])


def read_glimmer(name: str, reader: TextReader) -> ToolCalls:
    """Parse invocations between additional tags, in a message to the function that they also name."""
    reader.expect("<atem:function_calls>")
    inner = reader.read_until("</atem:function_calls>")
    return _only(reader, invocation_reader("atem:")(TextReader(inner, reader.schemas)))


def _from_json(value: Any) -> ToolCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(value, dict):
        raise MalformedCall("a call is not an object")
    name = function.get("name", function.get("tool_name"))
    call_id = value.get("id", value.get("tool_call_id", ""))
    arguments = function.get("arguments", function.get("parameters"))
    return _call(name, arguments, call_id if isinstance(call_id, str) else "")


def _call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = parse_json_or_text(arguments)  # some models write the JSON as a string
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise MalformedCall("no function name, or arguments without names")
    return ToolCall(name, dump_arguments(arguments), call_id)


def _only(reader: TextReader, calls: ToolCalls) -> ToolCalls:
    if not reader.at_end():
        raise MalformedCall("text after the calls")
    return calls


def _typed(reader: TextReader, name: str, key: str, text: str) -> Any:
    return parse_typed(text, reader.schemas.get(name, {}).get(key))


def _name(reader: TextReader) -> str:
    name = reader.read_match(_NAME)
    if name is None:
        raise MalformedCall(f"no name at {reader.position}")
    return name


def read_python_string(reader: TextReader) -> str | None:
    """Return the next string in single or double quotes, if any. Escapes that Python does not define are kept."""
    quoted = reader.read_match(_QUOTED)
    return None if quoted is None else _ESCAPE.sub(_unescape, quoted[1:-1])


def read_gemma_string(reader: TextReader) -> str | None:
    """Return the next string between Gemma's quote tokens, if any. It contains no escapes."""
    return reader.read_until('<|"|>') if reader.accept('<|"|>') else None


def read_value(reader: TextReader, string: StringReader) -> Any:
    """Parse a value that is not JSON, in Python's or Gemma's notation, with the given reader for strings. Raises
    MalformedCall.
    """
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

    Text that does not match its schema remains text, so that the function's caller can report it to the model.
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

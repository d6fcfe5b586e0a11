"""Tool calls as models write them, to `ToolCall`s: one function for each way of writing.

Each reads the whole text between the markup of `formats.py` and raises Malformed where it is anything else.
"""

import re
from collections.abc import Callable
from typing import Any

from localllm.request import ToolCall
from localllm.text.output.reader import Malformed, Reader
from localllm.text.output.values import as_json, dump, gemma_string, python_string, typed, value

Calls = list[ToolCall]
Read = Callable[[Reader], Calls]

_NAME = re.compile(r"[\w.\-]+")


def json_calls(reader: Reader) -> Calls:
    """`{"name": ..., "arguments": {...}}`, a list of those, or several in a row."""
    calls: Calls = []
    while not reader.at_end():
        found = reader.json()
        calls += map(_from_json, found if isinstance(found, list) else [found])
        reader.sees(";")
    return calls


def mistral(reader: Reader) -> Calls:
    """A list as above, or `name[CALL_ID]id[ARGS]{...}` again and again."""
    if reader.sees("["):
        reader.at -= 1
        return json_calls(reader)
    calls: Calls = []
    while not reader.at_end():
        name = _name(reader)
        call_id = _name(reader) if reader.sees("[CALL_ID]") else ""
        reader.sees("[ARGS]")
        calls.append(_call(name, reader.json(), call_id))
        reader.sees("[TOOL_CALLS]")
    return calls


def functions(reader: Reader) -> Calls:
    """Qwen3-Coder: `<function=name><parameter=key>value</parameter></function>`, line ends around the value."""
    calls: Calls = []
    while not reader.at_end():
        reader.need("<function=")
        name, arguments = reader.until(">"), {}
        while reader.sees("<parameter="):
            key = reader.until(">")
            text = reader.until("</parameter>", before=("<parameter=", "</function>"))
            arguments[key] = _typed(reader, name, key, text.removeprefix("\n").removesuffix("\n"))
        reader.need("</function>")
        calls.append(_call(name, arguments))
    return calls


def function_json(reader: Reader) -> Calls:
    """Functionary 3.1: `name>{...}`."""
    name = reader.until(">")
    return [_call(name, reader.json())]


def invocations(prefix: str) -> Read:
    """`<invoke name="f"><parameter name="key" string="true">value</parameter></invoke>`, tags with this prefix."""

    def read(reader: Reader) -> Calls:
        calls: Calls = []
        end = f"</{prefix}invoke>"
        while not reader.at_end():
            reader.need(f'<{prefix}invoke name="')
            name, arguments = reader.until('">'), {}
            while reader.sees(f'<{prefix}parameter name="'):
                key, _, string = reader.until('">').partition('" string="')
                text = reader.until(f"</{prefix}parameter>", before=(f"<{prefix}parameter", end))
                arguments[key] = {"true": text, "false": as_json(text)}.get(
                    string, _typed(reader, name, key, text)
                )
            reader.need(end)
            calls.append(_call(name, arguments))
        return calls

    return read


def glm(reader: Reader) -> Calls:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`"""
    name, arguments = _name(reader), {}
    while reader.sees("<arg_key>"):
        key = reader.until("</arg_key>")
        reader.need("<arg_value>")
        arguments[key] = _typed(reader, name, key, reader.until("</arg_value>", before=("<arg_key>",)))
    return [_call(name, arguments)]


def deepseek(reader: Reader) -> Calls:
    """V3: `function<｜tool▁sep｜>name`, then JSON in a code block; V3.1: `name<｜tool▁sep｜>` and bare JSON."""
    calls: Calls = []
    while not reader.at_end():
        reader.need("<｜tool▁call▁begin｜>")
        name = reader.until("<｜tool▁sep｜>")
        fenced = not reader.sees("{")
        reader.at -= not fenced
        name = reader.until("\n```json\n") if fenced else name
        calls.append(_call(name, reader.json()))
        if fenced:
            reader.need("```")
        reader.need("<｜tool▁call▁end｜>")
    return calls


def kimi(reader: Reader) -> Calls:
    """`functions.name:0<|tool_call_argument_begin|>{...}`; what stands before the JSON is the id, too."""
    calls: Calls = []
    while not reader.at_end():
        reader.need("<|tool_call_begin|>")
        call_id = reader.until("<|tool_call_argument_begin|>").strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        calls.append(_call(name, reader.json(), call_id))
        reader.need("<|tool_call_end|>")
    return calls


def gemma(reader: Reader) -> Calls:
    """`call:name{key:<|"|>text<|"|>,other:3}`"""
    reader.need("call:")
    return [_call(_name(reader), value(reader, gemma_string))]


def pythonic(reader: Reader) -> Calls:
    """`[name(key="text", other=3), name()]`"""
    calls: Calls = []
    reader.need("[")
    while not reader.sees("]"):
        name, arguments = _name(reader), {}
        reader.need("(")
        while not reader.sees(")"):
            key = _name(reader)
            reader.need("=")
            arguments[key] = value(reader, python_string)
            if not reader.sees(","):
                reader.need(")")
                break
        calls.append(_call(name, arguments))
        if not reader.sees(","):
            reader.need("]")
            break
    return calls


def arguments_alone(name: str, reader: Reader) -> Calls:
    """The arguments as JSON, in a message to the function of this name."""
    return _only(reader, [_call(name, reader.json())])


def glimmer(name: str, reader: Reader) -> Calls:
    """Invocations between tags of their own, in a message to the function that they name as well."""
    reader.need("<atem:function_calls>")
    inner = reader.until("</atem:function_calls>")
    return _only(reader, invocations("atem:")(Reader(inner, reader.schemas)))


def _from_json(found: Any) -> ToolCall:
    function = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(found, dict):
        raise Malformed("a call is no object")
    name = function.get("name", function.get("tool_name"))
    call_id = found.get("id", found.get("tool_call_id", ""))
    arguments = function.get("arguments", function.get("parameters"))
    return _call(name, arguments, call_id if isinstance(call_id, str) else "")


def _call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = as_json(arguments)  # some models write the JSON into a string
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise Malformed("no name of a function, or arguments without names")
    return ToolCall(name, dump(arguments), call_id)


def _only(reader: Reader, calls: Calls) -> Calls:
    if not reader.at_end():
        raise Malformed("text after the calls")
    return calls


def _typed(reader: Reader, name: str, key: str, text: str) -> Any:
    return typed(text, reader.schemas.get(name, {}).get(key))


def _name(reader: Reader) -> str:
    name = reader.match(_NAME)
    if name is None:
        raise Malformed(f"no name at {reader.at}")
    return name

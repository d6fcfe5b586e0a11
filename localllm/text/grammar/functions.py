"""The functions given to a model, as its grammar needs them: names, and JSON schemas of their arguments."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError
from localllm.request import MAX_SCHEMA_LEN, Grammar, Request, ToolUse

FUNCTION_NAME = re.compile(r"[\w.\-]{1,256}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolFunction:
    name: str
    schema: str  # of its arguments, JSON text
    strict: bool = False


@dataclass(frozen=True)
class ToolConstraint:
    """Functions that may be called, and how."""

    functions: tuple[ToolFunction, ...]
    tool_use: ToolUse
    content: Grammar | None = None
    """Grammar of an answer that calls none of the functions."""

    def is_strict(self, function: ToolFunction) -> bool:
        """Whether its arguments must follow their schema; always so for required calls."""
        return function.strict or self.tool_use.must_call


def build_tool_constraint(
    tools: Iterable[Mapping[str, Any]], use: ToolUse, content: Grammar | None = None
) -> ToolConstraint | None:
    """The constraint on calls; None if there is none, or only `content` without tools. content: the grammar of
    an answer that calls no function. A function without parameters takes none.

    Raises UsageError for a name that cannot be parsed back, parameters that are not an object's schema, duplicate
    names, and a requested name that does not exist.
    """
    tools = list(tools)
    is_free = use == ToolUse() and not any(_part(tool).get("strict") is True for tool in tools)
    if is_free and (content is None or not tools):
        return None
    functions = [_function(_part(tool)) for tool in tools]
    names = [function.name for function in functions]
    if use.must_call and not names:
        raise UsageError("a call is required, but there are no tools", "send tools, too")
    if not names:
        return None
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two functions have the name {duplicate}", "give each a unique name")
    requested = (use.name,) if use.name is not None else use.allowed
    if missing := next((name for name in requested if name not in names), None):
        raise UsageError(f"the function {missing!r} is to be called, but is not among the tools", "send it, too")
    if sum(len(function.schema) for function in functions) > MAX_SCHEMA_LEN:
        raise UsageError(f"the tools have more than {MAX_SCHEMA_LEN:,} characters", "send fewer")
    allowed = tuple(function for function in functions if not requested or function.name in requested)
    return ToolConstraint(allowed, use, None if use.must_call else content)


def request_tool_constraint(request: Request) -> ToolConstraint | None:
    """Return the constraint on a request's answer."""
    return build_tool_constraint(request.tools, request.tool_use, request.params.grammar)


def without_strict(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tool as a template sees it; `strict` is for the grammar only."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": without_strict(function)}
    return {name: value for name, value in tool.items() if name != "strict"}


def _part(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    part = tool.get("function", tool)
    return part if isinstance(part, Mapping) else {}


def _function(part: Mapping[str, Any]) -> ToolFunction:
    name, schema = part.get("name"), part.get("parameters")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise UsageError(f"a function has the name {name!r}", "use letters, digits, _, - and .")
    schema = NO_PARAMETERS if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise UsageError(f"the parameters of {name} are not an object's schema", 'send {"type": "object", ...}')
    return ToolFunction(name, json.dumps({"type": "object", **schema}), part.get("strict") is True)

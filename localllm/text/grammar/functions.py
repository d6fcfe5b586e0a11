"""The functions that a model is told of, as a grammar needs them: names, and JSON schemas of their arguments."""

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
    """Functions that may be called, and what is asked."""

    functions: tuple[ToolFunction, ...]
    tool_use: ToolUse
    content: Grammar | None = None
    """What an answer must be that calls none of them."""

    def is_strict(self, function: ToolFunction) -> bool:
        """Do its arguments keep to their schema? Those of a call that is required do."""
        return function.strict or self.tool_use.must_call


def build_tool_constraint(
    tools: Iterable[Mapping[str, Any]], use: ToolUse, content: Grammar | None = None
) -> ToolConstraint | None:
    """The constraint on calls; None where there is none, or only `content` without tools. content: the grammar of
    an answer that calls no function. A function without parameters takes none.

    Raises UsageError for one without a name that can be read back, one whose parameters are no object's schema,
    two of one name, and a name that is asked for and not there.
    """
    tools = list(tools)
    is_free = use == ToolUse() and not any(_part(tool).get("strict") is True for tool in tools)
    if is_free and (content is None or not tools):
        return None
    found = [_function(_part(tool)) for tool in tools]
    names = [function.name for function in found]
    if use.must_call and not names:
        raise UsageError("a call is required, and there are no tools", "send tools, too")
    if not names:
        return None
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two functions have the name {twice}", "give each one of its own")
    asked = (use.name,) if use.name is not None else use.allowed
    if missing := next((name for name in asked if name not in names), None):
        raise UsageError(f"the function {missing!r} is to be called, and is not among the tools", "send it, too")
    if sum(len(function.schema) for function in found) > MAX_SCHEMA_LEN:
        raise UsageError(f"the tools have more than {MAX_SCHEMA_LEN:,} characters", "send fewer")
    allowed = tuple(function for function in found if not asked or function.name in asked)
    return ToolConstraint(allowed, use, None if use.must_call else content)


def request_tool_constraint(request: Request) -> ToolConstraint | None:
    """What its answer is held to."""
    return build_tool_constraint(request.tools, request.tool_use, request.params.grammar)


def without_strict(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """As a template is told of it: `strict` is for us."""
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
        raise UsageError(f"the parameters of {name} are no object's schema", 'send {"type": "object", ...}')
    return ToolFunction(name, json.dumps({"type": "object", **schema}), part.get("strict") is True)

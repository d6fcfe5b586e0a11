"""What a chat body asks of the use of its functions."""

from collections.abc import Mapping
from typing import Any, Literal

from localllm.api.body import BadField, StrictModel, validate
from localllm.api.openai.functions import parse_tools
from localllm.request import ToolUse


class FunctionName(StrictModel):
    name: str


class FunctionChoice(StrictModel):
    """One function that is to be called, or is allowed."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def parse_tool_use(tools: Any, choice: Any, parallel: bool | None) -> tuple[list[dict[str, Any]] | None, ToolUse]:
    """The functions that the model is told of, and what it has to do with them: of a body's `tools`, `tool_choice`
    and `parallel_tool_calls`. `none` calls no function because the model is told of none. Raises BadField."""
    tools = None if tools is None else parse_tools(tools)
    if choice == "none":
        return None, ToolUse()
    use = _use(choice, parallel=parallel is not False)
    if choice is not None and tools is None:
        raise BadField("tool_choice", "there is a tool_choice and there are no tools", "send tools, too")
    names = {tool["function"]["name"] for tool in tools or ()}
    if missing := next(
        (name for name in (use.name, *use.allowed) if name is not None and name not in names), None
    ):
        raise BadField(
            "tool_choice", f"tool_choice names {missing!r}, which is not among the tools", "send it, too"
        )
    return tools, use if tools else ToolUse()


def _use(choice: Any, *, parallel: bool) -> ToolUse:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if choice in (None, "auto", "required"):
        return ToolUse(required=choice == "required", parallel=parallel)
    if kind == "function":
        return ToolUse(name=validate(FunctionChoice, choice, "tool_choice").function.name, parallel=parallel)
    if kind != "allowed_tools":
        remedy = "send none, auto, required, or a function"
        raise BadField("tool_choice", f"tool_choice {choice!r} is not supported", remedy)
    allowed = validate(AllowedToolsChoice, choice, "tool_choice").allowed_tools
    if not allowed.tools:
        raise BadField("tool_choice.allowed_tools.tools", "no tools are allowed", "send none as tool_choice")
    names = tuple(tool.function.name for tool in allowed.tools)
    return ToolUse(required=allowed.mode == "required", parallel=parallel, allowed=names)

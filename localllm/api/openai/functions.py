"""The functions that a chat body tells of, checked field by field."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api import limits
from localllm.api.body import SchemaType, StrictModel, ignore_field, validate
from localllm.errors import BadField


class FunctionDefinition(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


ToolList = Annotated[Any, SchemaType(list[Tool] | None)]
"""What `read_tools` reads."""


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Functions as they were sent, checked, with the fields that are known; None where there are none."""
    if not isinstance(tools, list):
        raise BadField("tools", "tools is no list", "send a list of functions")
    limits.check_count(limits.MAX_TOOLS, "tools", tools)
    return [function for index, tool in enumerate(tools) if (function := _function_tool(tool, index))] or None


def _function_tool(tool: Any, index: int) -> dict[str, Any] | None:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        ignore_tool(kind, index)
        return None
    validate(Tool, tool, f"tools.{index}")
    function = {name: value for name, value in tool["function"].items() if name in FunctionDefinition.model_fields}
    return {**{name: value for name, value in tool.items() if name in Tool.model_fields}, "function": function}


def ignore_tool(kind: str, index: int) -> None:
    """Note a tool of a type that cannot be declared to the model. Raises BadField where that is refused."""
    message = f"tools of type {kind[:40]} are not supported"
    ignore_field(f"tools.{index}.type", message, "send functions", name=f"tools[].{kind}")

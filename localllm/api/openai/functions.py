"""The functions that a chat body tells of, checked field by field."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api import limits
from localllm.api.body import BadField, SchemaType, StrictModel, validate


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
    """Functions as they were sent, checked; None where there are none."""
    if not isinstance(tools, list):
        raise BadField("tools", "tools is no list", "send a list of functions")
    limits.check_count(limits.MAX_TOOLS, "tools", tools)
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            raise BadField(f"tools.{place}.type", f"tools of type {kind} are not supported", "send functions")
        validate(Tool, tool, f"tools.{place}")
    return tools or None

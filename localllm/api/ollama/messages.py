"""The messages and tools of Ollama's chat body, checked field by field, as chat templates want them."""

from collections.abc import Mapping
from typing import Any

from localllm.api import limits
from localllm.api.body import StrictModel, validate
from localllm.api.openai.functions import ignore_tool
from localllm.errors import BadField

ROLES = ("system", "user", "assistant", "tool")
TEXT_ONLY_REMEDY = "this server reads text alone"


class FunctionCall(StrictModel):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class ToolCallPart(StrictModel):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(StrictModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # of the tool that answers, as Ollama had it once
    id: str | None = None  # of the message, which some clients number


class FunctionDefinition(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: str | None = None
    function: FunctionDefinition
    items: Any = None


def parse_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Raises BadField for a field that is unknown or of another type, for pictures, and a role that is none."""
    limits.check_count(limits.MAX_MESSAGES, "messages", messages)
    read: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # name and id of calls that nothing answers yet
    for place, message in enumerate(messages):
        at = f"messages.{place}"
        if not isinstance(message, Mapping):
            raise BadField(at, f"{at} is no object", "send a role and a content")
        said = validate(ChatMessage, message, at)
        role = said.role.lower()
        if role not in ROLES:
            raise BadField(f"{at}.role", f"invalid role: {said.role[:40]}, must be one of [{' '.join(ROLES)}]")
        if said.images:
            raise BadField(f"{at}.images", f"{at} has images", TEXT_ONLY_REMEDY)
        if role == "tool" and said.tool_name is None and said.name:
            said = said.model_copy(update={"tool_name": said.name})
        found: dict[str, Any] = {"role": role, "content": said.content or ""}
        if role == "assistant" and said.thinking:
            found["reasoning_content"] = said.thinking
        if role == "assistant" and said.tool_calls:
            found["tool_calls"] = [_call(call, len(waiting) + index) for index, call in enumerate(said.tool_calls)]
            waiting += [(call["function"]["name"], call["id"]) for call in found["tool_calls"]]
        if role == "tool":
            found |= _answered(said, waiting)
        read.append(found)
    return read


def _call(call: ToolCallPart, number: int) -> dict[str, Any]:
    """Ollama's clients name no calls; some templates want each to have a name of nine letters."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or f"call{number:05}", "type": "function", "function": function}


def _answered(said: ChatMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call this is the answer to: the one that is named, else the first of that function."""
    mine = next(
        (call for call in waiting if said.tool_call_id in (None, call[1]) and said.tool_name in (None, call[0])),
        None,
    )
    if mine:
        waiting.remove(mine)
    name, number = mine or (said.tool_name, said.tool_call_id)
    told = {"name": said.tool_name or name, "tool_call_id": said.tool_call_id or number}
    return {key: value for key, value in told.items() if value}


def parse_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Functions as templates want them; None where there are none. Raises BadField."""
    limits.check_count(limits.MAX_TOOLS, "tools", tools or ())
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(tools or ()):
        at = f"tools.{place}"
        if not isinstance(tool, Mapping):
            raise BadField(at, f"{at} is no object", "send a type and a function")
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in ("", "function"):
            ignore_tool(kind, place)
            continue
        validate(Tool, tool, at)
        known = FunctionDefinition.model_fields
        function = {key: value for key, value in tool["function"].items() if value is not None and key in known}
        found.append({"type": "function", "function": function})
    return found or None

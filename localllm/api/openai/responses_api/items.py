"""Translates the input items of `/v1/responses` into chat messages.

A model's turn is several items here (reasoning, message, tool calls), but one chat message.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api.body import (
    MAX_MESSAGES,
    SchemaType,
    StrictModel,
    check_count,
    drop_nulls,
    ignore_field,
    validate,
)
from localllm.api.openai.messages import join_text
from localllm.api.openai.responses_api.tools import LOCAL_SHELL, joined_name
from localllm.errors import BadField

Message = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(StrictModel):
    type: str = "message"
    id: str | None = None
    status: Status | None = None


class TextPartItem(StrictModel):
    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: Any = None


TextContent = Annotated[Any, SchemaType(str | list[TextPartItem] | None)]


class MessageItem(Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(Item):
    call_id: str
    output: TextContent


class CustomToolCallItem(Item):
    call_id: str
    name: str
    input: str


class LocalShellCallItem(Item):
    call_id: str
    action: dict[str, Any]


class LocalShellOutputItem(Item):
    call_id: str | None = None  # may be in `id` instead
    output: TextContent


class ReasoningItem(Item):
    summary: TextContent = None
    content: TextContent = None
    encrypted_content: str | None = None  # readable only by the server that made it


ITEM_TYPES: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "local_shell_call": LocalShellCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "reasoning": ReasoningItem,
}
# Items of tools that only other servers have.
FOREIGN_ITEM = re.compile(
    r"\w+_call(_output)?|mcp_\w+|compaction\w*|ghost_snapshot|tool_search\w*|other|additional_\w+"
)
TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_from_input(input: Any, instructions: str | None) -> list[Message]:
    """Messages of a text or a list of items. Raises BadField for anything else, and for unknown item types."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(input, str):
        return [*messages, {"role": "user", "content": input}]
    if not isinstance(input, list) or not input:
        raise BadField("input", "input is neither a string nor a non-empty list", "send one of them")
    check_count(MAX_MESSAGES, "input", input)
    for index, item in enumerate(input):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[Message], item: Any, path: str) -> None:
    item_type = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item_type, str) or item_type not in ITEM_TYPES:
        message, remedy = f"{path} has the type {str(item_type)[:40]}", f"send one of {', '.join(ITEM_TYPES)}"
        if isinstance(item_type, str) and FOREIGN_ITEM.fullmatch(item_type):
            ignore_field(f"{path}.type", message, remedy, name=f"input[].{item_type}")
            return
        raise BadField(f"{path}.type", message, remedy)
    match validate(ITEM_TYPES[item_type], drop_nulls(item), path):
        case MessageItem(role="assistant", content=content):
            _assistant_turn(messages, "content")["content"] = _text(content, f"{path}.content")
        case MessageItem(role=role, content=content):
            messages.append({"role": role, "content": _text(content, f"{path}.content")})
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments, namespace=namespace):
            _add_call(messages, call_id, joined_name(namespace, name), arguments)
        case CustomToolCallItem(call_id=call_id, name=name, input=text):
            _add_call(messages, call_id, name, json.dumps({"input": text}, ensure_ascii=False))
        case LocalShellCallItem(call_id=call_id, action=action):
            names = ("command", "working_directory", "timeout_ms")
            arguments = {name: action[name] for name in names if action.get(name) is not None}
            _add_call(messages, call_id, LOCAL_SHELL, json.dumps(arguments, ensure_ascii=False))
        case LocalShellOutputItem(call_id=call_id, id=id, output=output):
            text = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id or id or "", "content": text})
        case FunctionCallOutputItem(call_id=call_id, output=output):
            text = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case ReasoningItem(summary=summary, content=content):
            text = _text(content or summary or [], f"{path}.content")
            _assistant_turn(messages, "reasoning_content")["reasoning_content"] = text


def _add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant_turn(messages).setdefault("tool_calls", []).append(call)


def _assistant_turn(messages: list[Message], field: str = "") -> Message:
    """The assistant message that an item belongs to: the last message, or a new one if the last has another role,
    or, given a field to set, already has it or a tool call."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (field and (last.get(field) is not None or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, path: str) -> str:
    return join_text(content, path, TextPartItem, TEXT_PART_TYPES)

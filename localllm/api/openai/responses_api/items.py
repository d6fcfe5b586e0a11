"""Items of a response's input to the messages of a chat.

What a model says in one turn is several items here (thoughts, a message, calls), and one message there.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api.body import MAX_MESSAGES, MAX_PARTS, SchemaType, StrictModel, check_count, ignore_field, validate
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
    call_id: str | None = None  # in `id`, as OpenAI documents
    output: TextContent


class ReasoningItem(Item):
    summary: TextContent = None
    content: TextContent = None
    encrypted_content: str | None = None  # of another server, for itself


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
# Items of other servers' tools, which say nothing to a model that has them not.
FOREIGN_ITEM = re.compile(
    r"\w+_call(_output)?|mcp_\w+|compaction\w*|ghost_snapshot|tool_search\w*|other|additional_\w+"
)
TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_from_input(given: Any, instructions: str | None) -> list[Message]:
    """A text or a list of items. Raises BadField for what is neither, and for items of other kinds."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadField("input", "input is neither a text nor a list with an item in it", "send one of the two")
    check_count(MAX_MESSAGES, "input", given)
    for place, item in enumerate(given):
        _add(messages, item, f"input.{place}")
    return messages


def _add(messages: list[Message], item: Any, at: str) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if isinstance(kind, str) and kind not in ITEM_TYPES and FOREIGN_ITEM.fullmatch(kind):
        remedy = f"send one of {', '.join(ITEM_TYPES)}"
        ignore_field(f"{at}.type", f"{at} is of the type {kind[:40]}", remedy, name=f"input[].{kind}")
        return
    if not isinstance(kind, str) or kind not in ITEM_TYPES:
        raise BadField(
            f"{at}.type", f"{at} is of the type {str(kind)[:40]}", f"send one of {', '.join(ITEM_TYPES)}"
        )
    match validate(ITEM_TYPES[kind], {name: value for name, value in item.items() if value is not None}, at):
        case MessageItem(role="assistant", content=content):
            turn = _turn(messages, "content")
            turn["content"] = _text(content, f"{at}.content")
        case MessageItem(role=role, content=content):
            messages.append({"role": role, "content": _text(content, f"{at}.content")})
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments, namespace=namespace):
            _add_call(messages, call_id, joined_name(namespace, name), arguments)
        case CustomToolCallItem(call_id=call_id, name=name, input=text):
            _add_call(messages, call_id, name, json.dumps({"input": text}, ensure_ascii=False))
        case LocalShellCallItem(call_id=call_id, action=action):
            names = ("command", "working_directory", "timeout_ms")
            arguments = {name: action[name] for name in names if action.get(name) is not None}
            _add_call(messages, call_id, LOCAL_SHELL, json.dumps(arguments, ensure_ascii=False))
        case LocalShellOutputItem(call_id=call_id, id=id, output=output):
            text = _text(output, f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": call_id or id or "", "content": text})
        case FunctionCallOutputItem(call_id=call_id, output=output):
            text = _text(output, f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case ReasoningItem(summary=summary, content=content):
            told = content or summary or []
            _turn(messages, "reasoning_content")["reasoning_content"] = _text(told, f"{at}.content")


def _add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _turn(messages).setdefault("tool_calls", []).append(call)


def _turn(messages: list[Message], without: str = "") -> Message:
    """The assistant's message that an item belongs to: the last, unless somebody else spoke, or `without` or a
    call of a function stands in it already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (without and (last.get(without) is not None or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, at: str) -> str:
    """A text, or parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(at, f"{at} is no text", "send a string, or a list of parts that are texts")
    check_count(MAX_PARTS, at, content)
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in TEXT_PART_TYPES:
            raise BadField(f"{at}.{place}.type", f"parts of type {str(kind)[:40]} are not supported", "send texts")
        texts.append(validate(TextPartItem, part, f"{at}.{place}").text)
    return "".join(texts)

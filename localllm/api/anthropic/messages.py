"""Messages of Anthropic's API, validated and in the form that chat templates expect.

Templates expect one text per message, an assistant's reasoning and tool calls, and one message per tool result. So
the texts of a message are joined by an empty line, and so are consecutive messages of one role. A tool result that
is an error starts with "Error: ", as templates have no field for it.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api.body import MAX_MESSAGES, MAX_PARTS, SchemaType, StrictModel, check_count, ignore_field, validate
from localllm.errors import BadField

Message = dict[str, Any]
TEXT_SEPARATOR = "\n\n"


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = ""
    cache_control: Any = None


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageBody(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, SchemaType(str | list[Block])]


# Blocks that Anthropic's servers add, and that other models cannot read.
SERVER_BLOCK_TYPES = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_use|container_upload|compaction|fallback|\w+_tool_result"
)
BLOCK_TYPES: dict[str, dict[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


def parse_messages(messages: Any, system: Any) -> list[Message]:
    """Chat messages. Raises BadField for a malformed conversation, unsupported blocks, and a tool result without a
    call."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is not a non-empty list", "send at least one message")
    check_count(MAX_MESSAGES, "messages", messages)
    chat = [] if system is None else _system_messages(parse_blocks(system, "system", "system"))
    function_names: dict[str, str] = {}  # by call id
    last_role = ""
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not isinstance(message, Mapping):
            raise BadField(path, f"{path} is not a message", 'send {"role": ..., "content": ...}')
        body = validate(MessageBody, message, path)
        blocks = parse_blocks(body.content, body.role, f"{path}.content")
        new = TRANSLATORS[body.role](blocks, function_names, path)
        if body.role == last_role and new and chat[-1]["role"] == new[0]["role"] != "tool":
            chat[-1] = _merge(chat[-1], new.pop(0))
        chat += new
        last_role = body.role
    if last_role == "system":
        raise BadField(
            f"messages.{len(messages) - 1}", "the last message is a system message", "send a user message"
        )
    if last_role == "assistant":  # the answer continues it
        chat[-1]["prefix"] = True
    return chat


def parse_blocks(content: Any, role: str, path: str) -> list[Block]:
    """Validated blocks; a string is one text block. Raises BadField."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)] if content else []
    if not isinstance(content, list):
        raise BadField(path, f"{path} is neither a string nor a list of blocks", "send one of them")
    check_count(MAX_PARTS, path, content)
    return [
        parsed for index, block in enumerate(content) if (parsed := _parse_block(block, role, f"{path}.{index}"))
    ]


def _parse_block(block: Any, role: str, path: str) -> Block | None:
    """None for a block of Anthropic's servers, which is recorded as ignored."""
    block_type = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block_type, str):
        raise BadField(path, f"{path} is not a block", 'send {"type": "text", "text": ...}')
    if block_type in BLOCK_TYPES[role]:
        return validate(BLOCK_TYPES[role][block_type], block, path)
    message = f"blocks of type {block_type} are not supported here"
    if role == "assistant" and SERVER_BLOCK_TYPES.fullmatch(block_type):
        ignore_field(f"{path}.type", message, name=f"messages[].content[].{block_type}")
        return None
    raise BadField(f"{path}.type", message, f"send {', '.join(BLOCK_TYPES[role])}")


def _text(blocks: list[Block]) -> str:
    return TEXT_SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock) and block.text)


def _system_messages(blocks: list[Block], *_: Any) -> list[Message]:
    text = _text(blocks)
    return [{"role": "system", "content": text}] if text else []


def _user_messages(blocks: list[Block], function_names: Mapping[str, str], path: str) -> list[Message]:
    """Tool results first, then the user's text."""
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            at = f"{path}.content.{index}"
            name = function_names.get(block.tool_use_id)
            if name is None:
                raise BadField(
                    f"{at}.tool_use_id", f"{at} belongs to no earlier tool_use", "send the tool_use as well"
                )
            text = _text(parse_blocks(block.content or "", "system", f"{at}.content"))
            text = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})
    text = _text(blocks)
    return [*messages, *([{"role": "user", "content": text}] if text or not messages else [])]


def _assistant_messages(blocks: list[Block], function_names: dict[str, str], _: str) -> list[Message]:
    """One message with text, reasoning and tool calls, whose function names are added to `function_names`."""
    reasoning = TEXT_SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    function_names |= {use.id: use.name for use in uses}
    message: Message = {"role": "assistant", "content": _text(blocks) or (None if uses else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if uses:
        message["tool_calls"] = [_tool_call(use) for use in uses]
    return [message]


def _tool_call(use: ToolUseBlock) -> Message:
    arguments = json.dumps(use.input, ensure_ascii=False)
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": arguments}}


def _merge(first: Message, second: Message) -> Message:
    texts = [text for text in (first["content"], second["content"]) if text]
    merged = {**first, **second, "content": TEXT_SEPARATOR.join(texts) or first["content"]}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


TRANSLATORS = {"system": _system_messages, "user": _user_messages, "assistant": _assistant_messages}

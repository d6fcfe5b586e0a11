"""The messages of a body, with their blocks, as chat templates want them.

Templates know one text a message, the calls and the thoughts of an assistant, and a message a tool's result. So
texts of one message are joined by an empty line, and so are messages of one role that follow each other, which
this API takes for one. A result that is an error says so at its beginning, as templates have no other place.
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


# What Anthropic's servers add to a conversation of their own accord, and no other model can read.
SERVER_BLOCK_TYPES = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_use|container_upload|compaction|fallback|\w+_tool_result"
)
BLOCK_TYPES: dict[str, dict[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


def parse_messages(messages: Any, system: Any) -> list[Message]:
    """Raises BadField for what is no conversation, a block that is unknown or no text, and a result of no call."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is no list with a message in it", "send at least one")
    check_count(MAX_MESSAGES, "messages", messages)
    found = [] if system is None else _system(parse_blocks(system, "system", "system"))
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    last = ""
    for place, message in enumerate(messages):
        at = f"messages.{place}"
        said = validate(MessageBody, message, at) if isinstance(message, Mapping) else None
        if said is None:
            raise BadField(at, f"{at} is no message", 'send {"role": ..., "content": ...}')
        blocks = parse_blocks(said.content, said.role, f"{at}.content")
        made = _WAYS[said.role](blocks, names, at)
        if said.role == last and made and found[-1]["role"] == made[0]["role"] != "tool":
            found[-1] = _joined(found[-1], made.pop(0))
        found += made
        last = said.role
    if last == "system":
        raise BadField(f"messages.{len(messages) - 1}", "the last message is the system's", "send the user's")
    if last == "assistant":  # the answer goes on where it ends
        found[-1]["prefix"] = True
    return found


def parse_blocks(content: Any, role: str, path: str) -> list[Block]:
    """A string is one block of text."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)] if content else []
    if not isinstance(content, list):
        raise BadField(path, f"{path} is neither a text nor a list of blocks", "send one of the two")
    check_count(MAX_PARTS, path, content)
    return [made for place, block in enumerate(content) if (made := _block(block, role, f"{path}.{place}"))]


def _block(block: Any, role: str, at: str) -> Block | None:
    """None for what only Anthropic's servers read, which is noted."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise BadField(at, f"{at} is no block", 'send {"type": "text", "text": ...}')
    if role == "assistant" and SERVER_BLOCK_TYPES.fullmatch(kind):
        message = f"blocks of type {kind} are not supported here"
        ignore_field(f"{at}.type", message, name=f"messages[].content[].{kind}")
        return None
    if kind not in BLOCK_TYPES[role]:
        known = ", ".join(BLOCK_TYPES[role])
        raise BadField(f"{at}.type", f"blocks of type {kind} are not supported here", f"send {known}")
    return validate(BLOCK_TYPES[role][kind], block, at)


def _text(blocks: list[Block]) -> str:
    return TEXT_SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock) and block.text)


def _system(blocks: list[Block], *_: Any) -> list[Message]:
    text = _text(blocks)
    return [{"role": "system", "content": text}] if text else []


def _user(blocks: list[Block], names: Mapping[str, str], at: str) -> list[Message]:
    """Results come before what the user says."""
    found: list[Message] = []
    for place, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            path = f"{at}.content.{place}"
            name = names.get(block.tool_use_id)
            if name is None:
                raise BadField(f"{path}.tool_use_id", f"{path} is of no call before it", "send the call, too")
            text = _text(parse_blocks(block.content or "", "system", f"{path}.content"))
            text = f"Error: {text}" if block.is_error else text
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})
    text = _text(blocks)
    return [*found, *([{"role": "user", "content": text}] if text or not found else [])]


def _assistant(blocks: list[Block], names: dict[str, str], _: str) -> list[Message]:
    thoughts = TEXT_SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    names |= {use.id: use.name for use in uses}
    said: Message = {"role": "assistant", "content": _text(blocks) or (None if uses else "")}
    if thoughts:
        said["reasoning_content"] = thoughts
    if uses:
        said["tool_calls"] = [_call(use) for use in uses]
    return [said]


def _call(use: ToolUseBlock) -> Message:
    arguments = json.dumps(use.input, ensure_ascii=False)
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": arguments}}


def _joined(first: Message, second: Message) -> Message:
    texts = [text for text in (first["content"], second["content"]) if text]
    joined = {**first, **second, "content": TEXT_SEPARATOR.join(texts) or first["content"]}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


_WAYS = {"system": _system, "user": _user, "assistant": _assistant}

"""The messages of a chat body, checked field by field, as chat templates want them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api.body import MAX_MESSAGES, MAX_PARTS, SchemaType, StrictModel, check_count, validate
from localllm.errors import BadField


class FunctionCall(StrictModel):
    name: str
    arguments: str


class ToolCallPart(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Any = None  # where a provider may keep things


class MessageContent(StrictModel):
    """What every message may have."""

    content: Annotated[Any, SchemaType(str | list[TextPart] | None)] = None
    name: str | None = None
    cache_control: Any = None


class TextMessage(MessageContent):
    role: Literal["system", "developer", "user"]


class AssistantMessage(MessageContent):
    """What an assistant said, as `responses.chat_completion` tells it."""

    role: Literal["assistant"]
    tool_calls: list[ToolCallPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None  # the answer goes on where it ends, as Mistral and DeepSeek have it
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


class ToolMessage(MessageContent):
    """What a tool gave back."""

    role: Literal["tool"]
    tool_call_id: str


MessageList = Annotated[Any, SchemaType(list[TextMessage | AssistantMessage | ToolMessage])]
"""What `read_messages` reads."""

MESSAGE_TYPES: dict[str, type[TextMessage | AssistantMessage | ToolMessage]] = {
    "system": TextMessage,
    "developer": TextMessage,
    "user": TextMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
}
ROLE_ALIASES = {"developer": "system"}
OPTIONAL_FIELDS = ("name", "tool_calls", "reasoning_content", "reasoning", "tool_call_id", "prefix")


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with one text each, roles that templates know, and nothing in them that is null.

    Raises BadField for what is no text, a field that is unknown, or a role that is.
    """
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is no list with a message in it", "send at least one")
    check_count(MAX_MESSAGES, "messages", messages)
    return [_read_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _read_message(message: Any, at: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    kind = MESSAGE_TYPES.get(role) if isinstance(role, str) else None
    if kind is None:
        raise BadField(f"{at}.role", f"{at} has the role {role!r}", f"send one of {', '.join(MESSAGE_TYPES)}")
    checked = validate(kind, message, at)
    said = {name: message[name] for name in OPTIONAL_FIELDS if message.get(name) is not None}
    if checked.content is None and role == "assistant":
        return {"role": role, "content": None if said.get("tool_calls") else "", **said}
    return {
        "role": ROLE_ALIASES.get(checked.role, role),
        "content": _text(checked.content, f"{at}.content"),
        **said,
    }


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(at, f"{at} is no text", "send a string, or a list of parts of type text")
    check_count(MAX_PARTS, at, content)
    texts = []
    for place, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if isinstance(kind, str) and kind != "text":
            raise BadField(f"{at}.{place}.type", f"parts of type {kind} are not supported", "send text alone")
        if kind is None or not isinstance(text, str):
            raise BadField(f"{at}.{place}", f"{at}.{place} is no part", 'send {"type": "text", "text": ...}')
        texts.append(validate(TextPart, part, f"{at}.{place}").text)
    return "".join(texts)

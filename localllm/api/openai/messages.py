"""Messages of OpenAI's chat body, validated and in the form that chat templates expect."""

from collections.abc import Mapping, Sequence
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
    cache_control: Any = None  # prompt caching is automatic


class MessageContent(StrictModel):
    """Fields of every message."""

    content: Annotated[Any, SchemaType(str | list[TextPart] | None)] = None
    name: str | None = None
    cache_control: Any = None


class TextMessage(MessageContent):
    role: Literal["system", "developer", "user"]


class AssistantMessage(MessageContent):
    """A message as in the answers of `responses.chat_completion_object`."""

    role: Literal["assistant"]
    tool_calls: list[ToolCallPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None  # the answer continues it, as in the APIs of Mistral and DeepSeek
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


class ToolMessage(MessageContent):
    """The result of a tool call."""

    role: Literal["tool"]
    tool_call_id: str


MessageList = Annotated[Any, SchemaType(list[TextMessage | AssistantMessage | ToolMessage])]
"""Validated by `parse_messages`."""

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
    """Messages with a single text each, roles that templates support, and without nulls.

    Raises BadField for content other than text, and for unknown roles and fields.
    """
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is not a non-empty list", "send at least one message")
    check_count(MAX_MESSAGES, "messages", messages)
    return [_parse_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _parse_message(message: Any, path: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    message_type = MESSAGE_TYPES.get(role) if isinstance(role, str) else None
    if message_type is None:
        raise BadField(f"{path}.role", f"{path} has the role {role!r}", f"send one of {', '.join(MESSAGE_TYPES)}")
    body = validate(message_type, message, path)
    fields = {name: message[name] for name in OPTIONAL_FIELDS if message.get(name) is not None}
    if body.content is None and role == "assistant":
        return {"role": role, "content": None if fields.get("tool_calls") else "", **fields}
    role = ROLE_ALIASES.get(body.role, role)
    return {"role": role, "content": join_text(body.content, f"{path}.content"), **fields}


def join_text(
    content: Any, path: str, part_model: type[StrictModel] = TextPart, part_types: Sequence[str] = ("text",)
) -> str:
    """A string as it is, or the concatenation of text parts of the given types. Raises BadField for other
    content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(path, f"{path} is not text", "send a string, or a list of text parts")
    check_count(MAX_PARTS, path, content)
    for index, part in enumerate(content):
        at = f"{path}.{index}"
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part_type, str):
            remedy = f'send {{"type": "{part_types[0]}", "text": ...}}'
            raise BadField(at, f"{at} is not a content part", remedy)
        if part_type not in part_types:
            raise BadField(f"{at}.type", f"parts of type {part_type[:40]} are not supported", "send text only")
        validate(part_model, part, at)
    return "".join(part["text"] for part in content)

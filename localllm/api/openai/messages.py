"""The messages of a chat body, checked field by field, as chat templates want them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from localllm.api.body import BadField, Shown, Strict, validated


class CalledFunction(Strict):
    name: str
    arguments: str


class Call(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """What every message may have."""

    content: Annotated[Any, Shown(str | list[TextPart] | None)] = None
    name: str | None = None


class Spoken(Message):
    role: Literal["system", "developer", "user"]


class Answered(Message):
    """What an assistant said, as `responses.chat_completion` tells it."""

    role: Literal["assistant"]
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None


class Returned(Message):
    """What a tool gave back."""

    role: Literal["tool"]
    tool_call_id: str


Messages = Annotated[Any, Shown(list[Spoken | Answered | Returned])]
"""What `read_messages` reads."""

ROLES: dict[str, type[Spoken | Answered | Returned]] = {
    "system": Spoken,
    "developer": Spoken,
    "user": Spoken,
    "assistant": Answered,
    "tool": Returned,
}
SAME_ROLE = {"developer": "system"}
KEPT = ("name", "tool_calls", "reasoning_content", "reasoning", "tool_call_id")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with one text each, roles that templates know, and nothing in them that is null.

    Raises BadField for what is no text, a field that is unknown, or a role that is.
    """
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is no list with a message in it", "send at least one")
    return [_read_message(message, f"messages.{place}") for place, message in enumerate(messages)]


def _read_message(message: Any, at: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    kind = ROLES.get(role) if isinstance(role, str) else None
    if kind is None:
        raise BadField(f"{at}.role", f"{at} has the role {role!r}", f"send one of {', '.join(ROLES)}")
    checked = validated(kind, message, at)
    said = {name: message[name] for name in KEPT if message.get(name) is not None}
    if checked.content is None and role == "assistant":
        return {"role": role, "content": None if said.get("tool_calls") else "", **said}
    return {"role": SAME_ROLE.get(checked.role, role), "content": _text(checked.content, f"{at}.content"), **said}


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(at, f"{at} is no text", "send a string, or a list of parts of type text")
    texts = []
    for place, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if isinstance(kind, str) and kind != "text":
            raise BadField(f"{at}.{place}.type", f"parts of type {kind} are not supported", "send text alone")
        if kind is None or not isinstance(text, str) or part.keys() != {"type", "text"}:
            raise BadField(f"{at}.{place}", f"{at}.{place} is no part", 'send {"type": "text", "text": ...}')
        texts.append(text)
    return "".join(texts)

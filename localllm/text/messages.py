"""Normalizes messages from callers for templates."""

import json
from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError

Message = Mapping[str, Any]


def normalize_message(message: Message) -> Message:
    """Return the message with its text as one string, joining parts of type `text`.

    Raises UsageError for other content.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UsageError("a message has no role", "give each a role and a content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    parts = content if isinstance(content, list) else [content]
    texts_or_none = [p.get("text") for p in parts if isinstance(p, Mapping) and p.get("type") == "text"]
    texts = [text for text in texts_or_none if isinstance(text, str)]
    if len(texts) < len(parts):
        raise UsageError(f"the content of a {role} message is not text", "this model reads only text")
    return {**message, "content": "".join(texts)}


def convert_tool_arguments(message: Message, *, as_text: bool) -> Message:
    """Return the message with its tool call arguments as JSON text, or as objects if they can be parsed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_arguments(call, as_text) for call in calls]}


def _with_arguments(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if as_text or not isinstance(arguments, str):
        return call
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": values} if isinstance(values, dict) else call

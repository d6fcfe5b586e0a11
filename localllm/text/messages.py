"""Messages as callers send them, made ready for templates. Knows nothing of Jinja."""

import json
from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError

Message = Mapping[str, Any]


def normalize_message(message: Message) -> Message:
    """With its text as one string: parts of type `text` are joined. Raises UsageError for what is no text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UsageError("a message has no role", "give each a role and a content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    parts = content if isinstance(content, list) else [content]
    found = [p.get("text") for p in parts if isinstance(p, Mapping) and p.get("type") == "text"]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        raise UsageError(f"the content of a {role} message is no text", "this model reads text alone")
    return {**message, "content": "".join(texts)}


def convert_tool_arguments(message: Message, *, as_text: bool) -> Message:
    """With the arguments of its tool calls as JSON text, or as objects where the text holds one."""
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

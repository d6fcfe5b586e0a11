"""Builds requests for four APIs, and parses the messages of their streams.

    completions      POST /v1/completions        OpenAI's format: events that end with [DONE]
    chat             POST /v1/chat/completions
    ollama-generate  POST /api/generate          Ollama's format: one JSON object per line
    ollama-chat      POST /api/chat

Independent of time and connections. Prompts are sent verbatim to `completions` and `ollama-generate`, and to the
others as one user message, to which the server's chat template is applied.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class LoadRequest:
    """One request of a load, identical for every server."""

    prompt: str
    max_tokens: int  # most tokens of the answer
    ignore_eos: bool = False


@dataclass(frozen=True)
class StreamMessage:
    """The contents of one message of a stream. Counts are the server's own, None if not reported."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class ServerApi:
    """How to use one kind of API."""

    path: str
    uses_sse: bool  # server-sent events, otherwise a JSON object per line
    # Of a streamed request, from the model and the request.
    make_body: Callable[[str, LoadRequest], dict[str, Any]]
    parse_message: Callable[[Message], StreamMessage]


def _openai(model: str, ask: LoadRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": ask.max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return body | ({"ignore_eos": True} if ask.ignore_eos else {})


def _completions(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _openai(model, ask) | {"prompt": ask.prompt}


def _chat(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _openai(model, ask) | {"messages": [{"role": "user", "content": ask.prompt}]}


def _ollama(model: str, ask: LoadRequest) -> dict[str, Any]:
    return {"model": model, "stream": True, "options": {"num_predict": ask.max_tokens, "temperature": 0}}


def _ollama_generate(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _ollama(model, ask) | {"prompt": ask.prompt, "raw": True}


def _ollama_chat(model: str, ask: LoadRequest) -> dict[str, Any]:
    return _ollama(model, ask) | {"messages": [{"role": "user", "content": ask.prompt}]}


def _read_openai(message: Message) -> StreamMessage:
    """Parse a chunk of either API: a completion's text, or everything in a chat's delta, including reasoning
    and calls.
    """
    if message.get("error") is not None:  # some servers send null with every message
        return StreamMessage(error=_sentence(message["error"]))
    choice = _first(message.get("choices"))
    delta = _mapping(choice.get("delta"))
    parts = [choice.get("text"), *(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))]
    calls = [_mapping(_first(delta.get("tool_calls")).get("function")).get(name) for name in ("name", "arguments")]
    usage = _mapping(message.get("usage"))
    return StreamMessage(
        text="".join(part for part in [*parts, *calls] if isinstance(part, str)),
        finish_reason=_text(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def _read_ollama(message: Message) -> StreamMessage:
    if message.get("error") is not None:  # some servers send null with every message
        return StreamMessage(error=_sentence(message["error"]))
    said = _mapping(message.get("message"))
    parts = [message.get("response"), message.get("thinking"), said.get("content"), said.get("thinking")]
    done = message.get("done") is True
    return StreamMessage(
        text="".join(part for part in parts if isinstance(part, str)),
        finish_reason=(_text(message.get("done_reason")) or "stop") if done else None,
        prompt_tokens=_count(message.get("prompt_eval_count")),
        output_tokens=_count(message.get("eval_count")),
    )


def _sentence(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _mapping(value: object) -> Message:
    return value if isinstance(value, Mapping) else {}


def _first(value: object) -> Message:
    return _mapping(value[0]) if isinstance(value, list) and value else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


SERVER_APIS = {
    "completions": ServerApi("/v1/completions", True, _completions, _read_openai),
    "chat": ServerApi("/v1/chat/completions", True, _chat, _read_openai),
    "ollama-generate": ServerApi("/api/generate", False, _ollama_generate, _read_ollama),
    "ollama-chat": ServerApi("/api/chat", False, _ollama_chat, _read_ollama),
}

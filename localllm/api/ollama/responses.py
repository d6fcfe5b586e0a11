"""Answers as Ollama's API tells them: chunks of a stream, and whole ones. Durations are whole nanoseconds.

Log probabilities have the shape of OpenAI's. Names and times are the caller's. Knows nothing of HTTP.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from localllm.api.ollama.requests import Chat, Generate
from localllm.api.tokens import TokenTexts
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import GenerationEvent, Kind, Request, TokenLogprob, ToolCall

Object = dict[str, Any]

LEAST_LOGPROB = -9999.0  # JSON has no infinity
END_OF_TIME = 9_000_000_000.0  # seconds since 1970, in 2255: what is for ever in a field that wants a time


@dataclass(frozen=True)
class Clock:
    """When a request came, and what it waited for a model; in seconds of `time.perf_counter()`."""

    came: float
    loaded: float

    def durations(self, now: float, metrics: Metrics) -> Object:
        return {
            "total_duration": nanoseconds(now - self.came),
            "load_duration": nanoseconds(self.loaded - self.came),
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": nanoseconds(metrics.prefill_s),
            "eval_count": metrics.output_tokens,
            "eval_duration": nanoseconds(metrics.e2e_s - metrics.ttft_s),
        }


class Writer:
    """The chunks of one answer. The last has `done`, why it ended, and what it took."""

    def __init__(self, asked: Chat | Generate, request: Request, texts: TokenTexts, clock: Clock):
        self.asked = asked
        self.request = request
        self.texts = texts
        self.clock = clock
        self.calls = 0
        self.answer: list[int] = []

    def push(self, event: GenerationEvent, now: float) -> list[Object]:
        """The chunks that an event makes, none for a token that only moves the model on. now: as in Clock."""
        self.answer += event.token_ids
        chunks: list[Object] = []
        if event.text or event.tool_call or event.logprobs:
            chunks.append({**head(self.asked.model), **self.said(event), "done": False, **self.logprobs(event)})
        if event.finish_reason and event.metrics:
            chunks.append(
                {
                    **head(self.asked.model),
                    **self.nothing(),
                    "done": True,
                    "done_reason": event.finish_reason.value,
                    **self.context(),
                    **self.clock.durations(now, event.metrics),
                }
            )
        return chunks

    def said(self, event: GenerationEvent) -> Object:
        if isinstance(self.asked, Generate):
            thought = event.kind is Kind.REASONING
            return {"response": "" if thought else event.text, **({"thinking": event.text} if thought else {})}
        message: Object = {"role": "assistant", "content": "" if event.kind is Kind.REASONING else event.text}
        if event.kind is Kind.REASONING:
            message["thinking"] = event.text
        if event.tool_call:
            message["tool_calls"] = [tool_call(event.tool_call, self.calls)]
            self.calls += 1
        return {"message": message}

    def nothing(self) -> Object:
        if isinstance(self.asked, Generate):
            return {"response": ""}
        return {"message": {"role": "assistant", "content": ""}}

    def logprobs(self, event: GenerationEvent) -> Object:
        if self.asked.logprobs is None:
            return {}
        return {"logprobs": [logprob(entry, self.texts) for entry in event.logprobs]}

    def context(self) -> Object:
        """Token ids that a later request may begin with: the conversation up to here."""
        if isinstance(self.asked, Chat) or self.asked.raw:
            return {}
        return {"context": [*self.request.prompt_ids, *self.answer]}


def whole(chunks: Sequence[Object]) -> Object:
    """One object of all chunks of a stream."""
    done = dict(chunks[-1])
    if "response" in done:
        done |= _joined(chunks, ("response", "thinking"))
    else:
        messages = [chunk["message"] for chunk in chunks]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        done["message"] = {"role": "assistant", **_joined(messages, ("content", "thinking"))}
        done["message"] |= {"tool_calls": calls} if calls else {}
    found = [entry for chunk in chunks for entry in chunk.get("logprobs", ())]
    return done | ({"logprobs": found} if found else {})


def _joined(parts: Sequence[Object], names: tuple[str, ...]) -> Object:
    texts = {name: "".join(part.get(name, "") for part in parts) for name in names}
    return {name: text for name, text in texts.items() if text or name != "thinking"}


def without_answer(asked: Chat | Generate, reason: str) -> Object:
    """Of a request that only loads a model, or lets go of it."""
    empty: Object = (
        {"response": ""} if isinstance(asked, Generate) else {"message": {"role": "assistant", "content": ""}}
    )
    return {**head(asked.model), **empty, "done": True, "done_reason": reason}


def head(model: str) -> Object:
    return {"model": model, "created_at": rfc3339(datetime.now(UTC).timestamp())}


def tool_call(call: ToolCall, index: int) -> Object:
    """Arguments are an object here."""
    return {
        "id": call.id,
        "function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)},
    }


def logprob(entry: TokenLogprob, texts: TokenTexts) -> Object:
    named = _named(entry.token_id, entry.logprob, texts)
    return {**named, "top_logprobs": [_named(*pair, texts) for pair in entry.top]} if entry.top else named


def _named(token: int, value: float, texts: TokenTexts) -> Object:
    text, raw = texts(token)
    return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": None if raw is None else list(raw)}


def error_object(error: LocalLLMError) -> Object:
    return {"error": str(error)}


def nanoseconds(seconds: float) -> int:
    return 0 if math.isnan(seconds) else max(0, round(seconds * 1e9))


def rfc3339(seconds: float) -> str:
    """seconds: since 1970; inf: a time that nobody lives to see."""
    moment = datetime.fromtimestamp(min(seconds, END_OF_TIME), UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")

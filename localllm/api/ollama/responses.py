"""Ollama's answers: chunks of a stream, and the whole answer merged from them. Durations are in nanoseconds."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from localllm.api.ollama.requests import OllamaChat, OllamaGenerate
from localllm.api.openai.responses import token_object
from localllm.api.tokens import TokenTexts
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import EventType, GenerationEvent, Request, TokenLogprob, ToolCall

JsonObject = dict[str, Any]

MAX_TIMESTAMP_S = 9_000_000_000.0  # the year 2255, which stands for "forever"


@dataclass(frozen=True)
class RequestTimes:
    """When a request arrived and its model was loaded, in seconds of `time.perf_counter()`."""

    arrived_at: float
    loaded_at: float

    def durations(self, now: float, metrics: Metrics) -> JsonObject:
        return {
            "total_duration": nanoseconds(now - self.arrived_at),
            "load_duration": nanoseconds(self.loaded_at - self.arrived_at),
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": nanoseconds(metrics.prefill_s),
            "eval_count": metrics.output_tokens,
            "eval_duration": nanoseconds(metrics.e2e_s - metrics.ttft_s),
        }


class ChunkWriter:
    """Chunks of one answer. The last has `done`, `done_reason`, and durations."""

    def __init__(
        self, parsed: OllamaChat | OllamaGenerate, request: Request, token_texts: TokenTexts, times: RequestTimes
    ):
        self.parsed = parsed
        self.request = request
        self.token_texts = token_texts
        self.times = times
        self.tool_call_count = 0
        self.answer_ids: list[int] = []

    def chunks_for(self, event: GenerationEvent, now: float) -> list[JsonObject]:
        """Chunks of an event; none for a token without text. now: as in RequestTimes."""
        self.answer_ids += event.token_ids
        chunks: list[JsonObject] = []
        if event.text or event.tool_call or event.logprobs:
            chunks.append(
                {
                    **header_fields(self.parsed.model),
                    **self.content_fields(event),
                    "done": False,
                    **self.logprob_fields(event),
                }
            )
        if event.finish_reason and event.metrics:
            chunks.append(
                {
                    **header_fields(self.parsed.model),
                    **self.empty_content(),
                    "done": True,
                    "done_reason": event.finish_reason.value,
                    **self.context_fields(),
                    **self.times.durations(now, event.metrics),
                }
            )
        return chunks

    def content_fields(self, event: GenerationEvent) -> JsonObject:
        if isinstance(self.parsed, OllamaGenerate):
            is_reasoning = event.kind is EventType.REASONING
            return {"response": "", "thinking": event.text} if is_reasoning else {"response": event.text}
        message: JsonObject = {
            "role": "assistant",
            "content": "" if event.kind is EventType.REASONING else event.text,
        }
        if event.kind is EventType.REASONING:
            message["thinking"] = event.text
        if event.tool_call:
            message["tool_calls"] = [tool_call_object(event.tool_call, self.tool_call_count)]
            self.tool_call_count += 1
        return {"message": message}

    def empty_content(self) -> JsonObject:
        if isinstance(self.parsed, OllamaGenerate):
            return {"response": ""}
        return {"message": {"role": "assistant", "content": ""}}

    def logprob_fields(self, event: GenerationEvent) -> JsonObject:
        if self.parsed.logprobs is None:
            return {}
        return {"logprobs": [logprob_object(entry, self.token_texts) for entry in event.logprobs]}

    def context_fields(self) -> JsonObject:
        """`context`: token ids of the conversation so far, for a later request."""
        if isinstance(self.parsed, OllamaChat) or self.parsed.raw:
            return {}
        return {"context": [*self.request.prompt_ids, *self.answer_ids]}


def merge_chunks(chunks: Sequence[JsonObject]) -> JsonObject:
    """The answer as one object, from all chunks of a stream."""
    done = dict(chunks[-1])
    if "response" in done:
        done |= _join(chunks, ("response", "thinking"))
    else:
        messages = [chunk["message"] for chunk in chunks]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        done["message"] = {"role": "assistant", **_join(messages, ("content", "thinking"))}
        done["message"] |= {"tool_calls": calls} if calls else {}
    logprobs = [entry for chunk in chunks for entry in chunk.get("logprobs", ())]
    return done | ({"logprobs": logprobs} if logprobs else {})


def _join(parts: Sequence[JsonObject], names: tuple[str, ...]) -> JsonObject:
    texts = {name: "".join(part.get(name, "") for part in parts) for name in names}
    return {name: text for name, text in texts.items() if text or name != "thinking"}


def empty_answer(parsed: OllamaChat | OllamaGenerate, reason: str) -> JsonObject:
    """Answer to a request that only loads or unloads a model."""
    empty: JsonObject = (
        {"response": ""}
        if isinstance(parsed, OllamaGenerate)
        else {"message": {"role": "assistant", "content": ""}}
    )
    return {**header_fields(parsed.model), **empty, "done": True, "done_reason": reason}


def header_fields(model: str) -> JsonObject:
    return {"model": model, "created_at": format_rfc3339(datetime.now(UTC).timestamp())}


def tool_call_object(call: ToolCall, index: int) -> JsonObject:
    """A tool call; in this API the arguments are an object."""
    return {
        "id": call.id,
        "function": {"index": index, "name": call.name, "arguments": json.loads(call.arguments)},
    }


def logprob_object(entry: TokenLogprob, texts: TokenTexts) -> JsonObject:
    """A log probability in OpenAI's format, with `top_logprobs` only if requested."""
    token = token_object(entry.token_id, entry.logprob, texts)
    return {**token, "top_logprobs": [token_object(*pair, texts) for pair in entry.top]} if entry.top else token


def error_object(error: LocalLLMError) -> JsonObject:
    return {"error": str(error)}


def nanoseconds(seconds: float) -> int:
    return 0 if math.isnan(seconds) else max(0, round(seconds * 1e9))


def format_rfc3339(seconds: float) -> str:
    """RFC 3339 time in UTC. seconds: since 1970; inf becomes the year 2255."""
    moment = datetime.fromtimestamp(min(seconds, MAX_TIMESTAMP_S), UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")

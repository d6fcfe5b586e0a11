"""Chunks of OpenAI's streamed answers: `chat.completion.chunk` and `text_completion`, with timings as in
llama.cpp."""

import math
from collections.abc import Sequence

from localllm.api.openai.responses import (
    JsonObject,
    ResponseHeader,
    chat_logprobs,
    echo_text,
    finish_reason_text,
    reasoning_fields,
    text_logprobs,
    tool_call_object,
    usage_object,
    with_prompt_tokens,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.metrics import Metrics
from localllm.request import EventType, GenerationEvent, Request, TokenLogprob


class Timings:
    """The `timings` of llama.cpp's server for one answer: tokens so far (`predicted_n`), draft tokens (`draft_n`)
    and accepted ones (`draft_n_accepted`)."""

    def __init__(self) -> None:
        self.counts = {"predicted_n": 0, "draft_n": 0, "draft_n_accepted": 0}

    def fields_for(self, event: GenerationEvent) -> JsonObject:
        """The counts, and with the last event the measured times."""
        self.counts["predicted_n"] += len(event.token_ids)
        self.counts["draft_n"] += event.drafted
        self.counts["draft_n_accepted"] += event.accepted
        return {**self.counts, **(timing_fields(event.metrics) if event.metrics else {})}


def timing_fields(metrics: Metrics) -> JsonObject:
    """llama.cpp's fields, and queue time, TTFT and ITL percentiles as defined in `metrics.py`; None if
    unmeasured."""
    values = {
        "cache_n": metrics.cached_tokens,
        "prompt_n": metrics.prompt_tokens - metrics.cached_tokens,
        "prompt_ms": metrics.prefill_s * 1e3,
        "prompt_per_second": metrics.prefill_tokens_per_s,
        "predicted_ms": (metrics.e2e_s - metrics.ttft_s) * 1e3,
        "predicted_per_second": metrics.tokens_per_s,
        "queue_ms": metrics.queue_s * 1e3,
        "ttft_ms": metrics.ttft_s * 1e3,
        "itl_p50_ms": metrics.itl_percentile(50) * 1e3,
        "itl_p99_ms": metrics.itl_percentile(99) * 1e3,
    }
    return {name: None if math.isnan(value) else value for name, value in values.items()}


class ChatStream:
    """Chunks of a chat's choice `index`. The first has the role, the last the finish_reason."""

    def __init__(self, header: ResponseHeader, parsed: ParsedRequest, token_texts: TokenTexts, index: int = 0):
        self.parsed = parsed
        self.token_texts = token_texts
        self.index = index
        self.header_fields = _header_fields(header, "chat.completion.chunk", parsed)
        self.started = False
        self.tool_call_count = 0
        self.timings = Timings() if parsed.timings_per_token else None

    def chunks_for(self, event: GenerationEvent) -> list[JsonObject]:
        """Chunks of an event, usually one. `usage_chunk` follows the last event."""
        chunks: list[JsonObject] = []
        timings = self.timings and self.timings.fields_for(event)
        if not self.started:
            self.started = True
            chunks.append(self.chunk({"role": "assistant", "content": ""}))
        if event.text or event.tool_call or event.logprobs or (timings and event.token_ids):
            chunks.append(self.chunk(self.delta(event), event.logprobs))
        if event.finish_reason:
            called = self.tool_call_count > 0 and self.parsed.tool_use.name is None
            reason = finish_reason_text(event.finish_reason, called=called)
            chunks.append(self.chunk({}, reason=reason))
        if timings and chunks:
            chunks[-1]["timings"] = timings
        return chunks

    def has_text_alone(self, event: GenerationEvent) -> bool:
        """Whether `chunks_for` would only return the `text_chunk` of this event, and remember nothing."""
        special = event.logprobs or event.finish_reason or event.tool_call or self.timings
        return self.started and bool(event.text) and not special

    def text_chunk(self, kind: EventType, text: str) -> JsonObject:
        return self.chunk(reasoning_fields(text) if kind is EventType.REASONING else {"content": text})

    def delta(self, event: GenerationEvent) -> JsonObject:
        if event.tool_call:
            self.tool_call_count += 1
            return {"tool_calls": [{"index": self.tool_call_count - 1, **tool_call_object(event.tool_call)}]}
        return reasoning_fields(event.text) if event.kind is EventType.REASONING else {"content": event.text}

    def chunk(
        self, delta: JsonObject, logprobs: Sequence[TokenLogprob] = (), reason: str | None = None
    ) -> JsonObject:
        logprob_objects = chat_logprobs(logprobs, self.token_texts) if logprobs else None
        choice = {"index": self.index, "delta": delta, "logprobs": logprob_objects, "finish_reason": reason}
        return {**self.header_fields, "choices": [choice]}


class TextStream:
    """Chunks of a text completion's choice `index`."""

    def __init__(
        self,
        header: ResponseHeader,
        parsed: ParsedRequest,
        request: Request,
        token_texts: TokenTexts,
        index: int = 0,
    ):
        self.parsed = parsed
        self.token_texts = token_texts
        self.index = index
        self.header_fields = _header_fields(header, "text_completion", parsed)
        self.prompt_ids = request.prompt_ids if parsed.echo else ()  # not sent yet
        self.prompt_logprobs: list[TokenLogprob] = []
        self.text_offset = 0  # characters sent

    def chunks_for(self, event: GenerationEvent) -> list[JsonObject]:
        """Chunks of an event, at most one. `usage_chunk` follows the last event of all choices."""
        self.prompt_logprobs += event.prompt_logprobs
        if not (event.text or event.token_ids or event.finish_reason):
            return []  # a chunk of a long prompt was computed
        tokens = with_prompt_tokens(self.prompt_ids, self.prompt_logprobs, event.logprobs)
        chunk = self.chunk(
            echo_text(self.parsed, self.prompt_ids, self.token_texts) + event.text,
            text_logprobs(tokens, self.token_texts, self.text_offset)
            if self.parsed.params.logprobs is not None
            else None,
            event.finish_reason and finish_reason_text(event.finish_reason),
        )
        self.text_offset += sum(self.token_texts.character_count(token) for token, _ in tokens)
        self.prompt_ids, self.prompt_logprobs = (), []
        return [chunk]

    def has_text_alone(self, event: GenerationEvent) -> bool:
        """See `ChatStream.has_text_alone`."""
        special = self.parsed.params.logprobs is not None or self.prompt_ids or self.prompt_logprobs
        return bool(event.text) and not (special or event.prompt_logprobs or event.finish_reason)

    def text_chunk(self, kind: EventType, text: str) -> JsonObject:
        """kind: all of a completion is text."""
        return self.chunk(text)

    def chunk(self, text: str, logprobs: JsonObject | None = None, reason: str | None = None) -> JsonObject:
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self.header_fields, "choices": [choice]}


def usage_chunk(header: ResponseHeader, parsed: ParsedRequest, metrics_list: Sequence[Metrics]) -> JsonObject:
    """The last chunk if `stream_options.include_usage` is set. metrics_list: in the order of choices."""
    object_type = "chat.completion.chunk" if parsed.is_chat else "text_completion"
    usage = usage_object(metrics_list, parsed.answers_per_prompt)
    return {**header.fields(object_type), "choices": [], "usage": usage}


def _header_fields(header: ResponseHeader, object_type: str, parsed: ParsedRequest) -> JsonObject:
    """With `include_usage`, every chunk but the last has a null `usage`."""
    return {**header.fields(object_type), **({"usage": None} if parsed.include_usage else {})}

"""An answer piece by piece, as OpenAI's API streams it: chunks of `chat.completion.chunk` and `text_completion`.

A caller sends each as one server-sent event, then `[DONE]`. Knows nothing of HTTP.
"""

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


# How an answer goes, told with each of its tokens: `timings` of llama.cpp's server (`timings_per_token`).
#
# Beside that server's fields the last one has `queue_ms`, `ttft_ms`, `itl_p50_ms` and `itl_p99_ms`, as
# `metrics.py` defines them. Knows nothing of HTTP.
class Timings:
    """Counts the tokens of one answer: `predicted_n` so far, `draft_n` of them guessed before, `draft_n_accepted`
    of these rightly."""

    def __init__(self) -> None:
        self.counts = {"predicted_n": 0, "draft_n": 0, "draft_n_accepted": 0}

    def fields_for(self, event: GenerationEvent) -> JsonObject:
        """What is known with this event; with the last, the measurements."""
        self.counts["predicted_n"] += len(event.token_ids)
        self.counts["draft_n"] += event.drafted
        self.counts["draft_n_accepted"] += event.accepted
        return {**self.counts, **(timing_fields(event.metrics) if event.metrics else {})}


def timing_fields(metrics: Metrics) -> JsonObject:
    """Milliseconds and tokens a second; null where nothing could be measured."""
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
    """Chunks of one answer to messages, which is choice `index`. The first names the role, the last says why it
    ended."""

    def __init__(self, stamp: ResponseHeader, parsed: ParsedRequest, token_texts: TokenTexts, index: int = 0):
        self.parsed = parsed
        self.token_texts = token_texts
        self.index = index
        self.header_fields = _head(stamp.fields("chat.completion.chunk"), parsed)
        self.started = False
        self.tool_call_count = 0
        self.timings = Timings() if parsed.timings_per_token else None

    def chunks_for(self, event: GenerationEvent) -> list[JsonObject]:
        """The chunks that an event makes, often one; after the last event `usage_chunk` follows."""
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

    def delta(self, event: GenerationEvent) -> JsonObject:
        if event.tool_call:
            self.tool_call_count += 1
            return {"tool_calls": [{"index": self.tool_call_count - 1, **tool_call_object(event.tool_call)}]}
        return reasoning_fields(event.text) if event.kind is EventType.REASONING else {"content": event.text}

    def chunk(
        self, delta: JsonObject, logprobs: Sequence[TokenLogprob] = (), reason: str | None = None
    ) -> JsonObject:
        told = chat_logprobs(logprobs, self.token_texts) if logprobs else None
        choice = {"index": self.index, "delta": delta, "logprobs": told, "finish_reason": reason}
        return {**self.header_fields, "choices": [choice]}


class TextStream:
    """Chunks of the continuation of one text, which is choice `index`."""

    def __init__(
        self,
        stamp: ResponseHeader,
        parsed: ParsedRequest,
        request: Request,
        token_texts: TokenTexts,
        index: int = 0,
    ):
        self.parsed = parsed
        self.token_texts = token_texts
        self.index = index
        self.header_fields = _head(stamp.fields("text_completion"), parsed)
        self.prompt_ids = request.prompt_ids if parsed.echo else ()  # not told yet
        self.prompt_logprobs: list[TokenLogprob] = []
        self.text_offset = 0  # characters told

    def chunks_for(self, event: GenerationEvent) -> list[JsonObject]:
        """The chunks that an event makes, often one; after the last event of all choices `usage_chunk` follows."""
        self.prompt_logprobs += event.prompt_logprobs
        if not (event.text or event.token_ids or event.finish_reason):
            return []  # a part of a long prompt
        said = with_prompt_tokens(self.prompt_ids, self.prompt_logprobs, event.logprobs)
        choice = {
            "index": self.index,
            "text": echo_text(self.parsed, self.prompt_ids, self.token_texts) + event.text,
            "logprobs": text_logprobs(said, self.token_texts, self.text_offset)
            if self.parsed.params.logprobs is not None
            else None,
            "finish_reason": event.finish_reason and finish_reason_text(event.finish_reason),
        }
        self.text_offset += sum(self.token_texts.character_count(token) for token, _ in said)
        self.prompt_ids, self.prompt_logprobs = (), []
        return [{**self.header_fields, "choices": [choice]}]


def usage_chunk(stamp: ResponseHeader, parsed: ParsedRequest, metrics_list: Sequence[Metrics]) -> JsonObject:
    """What follows the last chunk of all where `stream_options` asks for it. metrics_list: in the order of
    choices."""
    kind = "chat.completion.chunk" if parsed.is_chat else "text_completion"
    return {**stamp.fields(kind), "choices": [], "usage": usage_object(metrics_list, parsed.answers_per_prompt)}


def _head(head: JsonObject, asked: ParsedRequest) -> JsonObject:
    """Where the usage is asked for, it is null in every chunk but the last."""
    return {**head, "usage": None} if asked.include_usage else head

"""OpenAI's answers: `chat.completion` and `text_completion` with their parts, the chunks of a stream, and errors.

Beyond OpenAI's fields there are `reasoning_content` and `reasoning`, the same text under the two names that
clients read, each choice's `seed`, and on request timings as in llama.cpp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import ContextOverflow, LocalLLMError, ModelNotFound
from localllm.metrics import Metrics
from localllm.request import Completion, EventType, FinishReason, GenerationEvent, Request, TokenLogprob, ToolCall

JsonObject = dict[str, Any]

MIN_LOGPROB = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


@dataclass(frozen=True)
class ResponseHeader:
    """The first fields of an object."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None = None

    def fields(self, object_type: str) -> JsonObject:
        fields: JsonObject = {"id": self.id, "object": object_type, "created": self.created, "model": self.model}
        if self.system_fingerprint is not None:
            fields["system_fingerprint"] = self.system_fingerprint
        return fields


def chat_completion_object(
    header: ResponseHeader,
    parsed: ParsedRequest,
    completions: Sequence[Completion],
    texts: TokenTexts,
    *,
    with_cached_tokens: bool = True,
) -> JsonObject:
    """A `chat.completion` object with one choice per answer. with_cached_tokens: report prompt tokens found in the
    prefix cache."""
    choices = [_chat_choice(index, parsed, completion, texts) for index, completion in enumerate(completions)]
    metrics_list = [completion.metrics for completion in completions]
    usage = usage_object(metrics_list, parsed.answers_per_prompt, with_cached_tokens=with_cached_tokens)
    return {**header.fields("chat.completion"), "choices": choices, "usage": usage}


def _chat_choice(index: int, parsed: ParsedRequest, completion: Completion, texts: TokenTexts) -> JsonObject:
    message: JsonObject = {
        "role": "assistant",
        "content": None if completion.tool_calls and not completion.text else completion.text,
        "refusal": None,
        **reasoning_fields(completion.reasoning),
    }
    if completion.tool_calls:
        message["tool_calls"] = [tool_call_object(call) for call in completion.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None if parsed.params.logprobs is None else chat_logprobs(completion.logprobs, texts),
        "finish_reason": finish_reason_text(
            completion.finish_reason, called=bool(completion.tool_calls) and parsed.tool_use.name is None
        ),
        "seed": completion.seed,
    }


def text_completion_object(
    header: ResponseHeader,
    parsed: ParsedRequest,
    completions: Sequence[Completion],
    texts: TokenTexts,
    *,
    with_cached_tokens: bool = True,
) -> JsonObject:
    """A `text_completion` object with one choice per returned answer. with_cached_tokens: as in
    `chat_completion_object`."""
    choices = [
        {
            "index": index,
            "text": echo_text(parsed, completion.prompt_ids, texts) + completion.text,
            "logprobs": _text_logprobs(parsed, completion, texts),
            "finish_reason": finish_reason_text(completion.finish_reason),
            "seed": completion.seed,
        }
        for index, completion in enumerate(_returned(parsed, completions))
    ]
    metrics_list = [completion.metrics for completion in completions]
    usage = usage_object(metrics_list, parsed.answers_per_prompt, with_cached_tokens=with_cached_tokens)
    return {**header.fields("text_completion"), "choices": choices, "usage": usage}


def _returned(parsed: ParsedRequest, completions: Sequence[Completion]) -> list[Completion]:
    """With `best_of`, the `n` answers per prompt with the highest mean log probability, best first; otherwise
    all."""
    if parsed.best_of is None:
        return list(completions)
    size = parsed.answers_per_prompt
    groups = [completions[start : start + size] for start in range(0, len(completions), size)]
    return [
        completion for group in groups for completion in sorted(group, key=_mean_logprob, reverse=True)[: parsed.n]
    ]


def _mean_logprob(completion: Completion) -> float:
    """Mean log probability per token; 0 without tokens."""
    return sum(entry.logprob for entry in completion.logprobs) / max(1, len(completion.logprobs))


def _text_logprobs(parsed: ParsedRequest, completion: Completion, texts: TokenTexts) -> JsonObject | None:
    if parsed.params.logprobs is None:
        return None
    prompt_ids = completion.prompt_ids if parsed.echo else ()
    return text_logprobs(with_prompt_tokens(prompt_ids, completion.prompt_logprobs, completion.logprobs), texts)


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> JsonObject:
    """Log probabilities of a chat: all sampled tokens, including reasoning, markup and the end token."""
    content = [
        {
            **token_object(entry.token_id, entry.logprob, texts),
            "top_logprobs": [token_object(*alternative, texts) for alternative in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[tuple[int, TokenLogprob | None]], texts: TokenTexts, offset: int = 0
) -> JsonObject:
    """Log probabilities of a text completion: four parallel lists, with null for the prompt's first token.

    offset: of the first token in the text, in characters.
    """
    offsets = accumulate((texts.character_count(token) for token, _ in tokens), initial=offset)
    return {
        "tokens": [texts(token)[0] for token, _ in tokens],
        "token_logprobs": [None if entry is None else finite_logprob(entry.logprob) for _, entry in tokens],
        "top_logprobs": [None if entry is None else _alternatives(entry, texts) for _, entry in tokens],
        "text_offset": list(offsets)[:-1],
    }


def with_prompt_tokens(
    prompt_ids: Sequence[int], prompt_logprobs: Sequence[TokenLogprob], answer: Sequence[TokenLogprob]
) -> list[tuple[int, TokenLogprob | None]]:
    """Tokens for `text_logprobs`: those of an echoed prompt, if any, and of the answer."""
    entries = [*([None] if prompt_ids else []), *prompt_logprobs]
    return [*zip(prompt_ids, entries, strict=True), *((entry.token_id, entry) for entry in answer)]


def _alternatives(entry: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """Log probabilities by text of the most likely tokens and the sampled one; the higher one for equal texts."""
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {texts(token)[0]: finite_logprob(value) for token, value in sorted(pairs, key=lambda pair: pair[1])}


def token_object(token: int, logprob: float, texts: TokenTexts) -> JsonObject:
    text, raw = texts(token)
    return {"token": text, "logprob": finite_logprob(logprob), "bytes": None if raw is None else list(raw)}


def finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def echo_text(parsed: ParsedRequest, prompt_ids: Sequence[int], texts: TokenTexts) -> str:
    """Text before an answer: the prompt with `echo`, otherwise nothing."""
    return texts.tokenizer.decode(prompt_ids) if parsed.echo else ""


def reasoning_fields(text: str) -> JsonObject:
    return {"reasoning_content": text, "reasoning": text} if text else {}


def tool_call_object(call: ToolCall) -> JsonObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_reason_text(reason: FinishReason, *, called: bool = False) -> str:
    """The reason; `tool_calls` instead of `stop` if the model chose to call a function (`called`). As in OpenAI's
    API, a call of the one function that tool_choice names is a `stop`."""
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


def usage_object(
    metrics_list: Sequence[Metrics], answers_per_prompt: int = 1, *, with_cached_tokens: bool = True
) -> JsonObject:
    """Token counts, including end tokens. answers_per_prompt: number of consecutive answers whose prompt counts
    once."""
    prompt = sum(metrics.prompt_tokens for metrics in metrics_list[::answers_per_prompt])
    answer = sum(metrics.output_tokens for metrics in metrics_list)
    counts: JsonObject = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    if with_cached_tokens:
        cached = sum(metrics.cached_tokens for metrics in metrics_list[::answers_per_prompt])
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    reasoning = sum(metrics.reasoning_tokens for metrics in metrics_list)
    counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


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


def error_object(error: LocalLLMError) -> JsonObject:
    """`{"error": {...}}`, with both token counts if the prompt exceeds the context."""
    status = error.http_status
    error_type = ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    param = getattr(error, "param", None)
    fields: JsonObject = {"message": str(error), "type": error_type, "param": param, "code": None}
    if isinstance(error, ContextOverflow):
        fields |= {
            "code": "context_length_exceeded",
            "n_prompt_tokens": error.prompt_tokens,
            "n_ctx": error.context,
        }
    if isinstance(error, ModelNotFound):
        fields |= {"code": "model_not_found", "param": "model"}
    return {"error": fields}

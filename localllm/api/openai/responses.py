"""OpenAI's answer objects: `chat.completion`, `text_completion`, log probabilities, usage, errors.

Beyond OpenAI's fields there are `reasoning_content` and `reasoning`, the same text under the two names that
clients read, and each choice's `seed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.errors import ContextOverflow, LocalLLMError, ModelNotFound
from localllm.metrics import Metrics
from localllm.request import Completion, FinishReason, TokenLogprob, ToolCall

JsonObject = dict[str, Any]

MIN_LOGPROB = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


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

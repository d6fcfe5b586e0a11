"""Answers as OpenAI's API tells them: `chat.completion` and `text_completion` objects, usage, errors.

Beside OpenAI's fields: `reasoning_content` and `reasoning` (the same text under the two names that clients look
for), and each choice's `seed`. Identifiers and times are the caller's. Knows nothing of HTTP.
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

# Log probabilities in OpenAI's two shapes. They are of every token that was drawn: those of thoughts and markup,
# and the one that ended the answer, are among them.

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this number for what is very unlikely


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """Of a chat: a list of tokens with their bytes and alternatives."""
    content = [
        {
            **_named(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_named(token, value, texts) for token, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[tuple[int, TokenLogprob | None]], texts: TokenTexts, offset: int = 0
) -> dict[str, Any]:
    """Of a text completion: four lists side by side, of token ids and what is known of each; null is said of a
    prompt's first token, which nothing predicts. offset: of the first token in the text, in characters."""
    named = [texts(token) for token, _ in tokens]
    return {
        "tokens": [text for text, _ in named],
        "token_logprobs": [None if entry is None else _number(entry.logprob) for _, entry in tokens],
        "top_logprobs": [None if entry is None else _alternatives(entry, texts) for _, entry in tokens],
        "text_offset": list(accumulate((texts.character_count(token) for token, _ in tokens), initial=offset))[
            :-1
        ],
    }


def with_prompt_tokens(
    prompt_ids: Sequence[int], prompt_logprobs: Sequence[TokenLogprob], answer: Sequence[TokenLogprob]
) -> list[tuple[int, TokenLogprob | None]]:
    """What `text_logprobs` wants of a prompt that is echoed, or of none, and its answer."""
    entries = [*([None] if prompt_ids else []), *prompt_logprobs]
    return [*zip(prompt_ids, entries, strict=True), *((entry.token_id, entry) for entry in answer)]


def _alternatives(entry: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """The likeliest, and the token itself; of two that look the same the likelier counts."""
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    return {texts(token)[0]: _number(value) for token, value in sorted(pairs, key=lambda pair: pair[1])}


def _named(token: int, value: float, texts: TokenTexts) -> dict[str, Any]:
    text, raw = texts(token)
    return {"token": text, "logprob": _number(value), "bytes": None if raw is None else list(raw)}


def _number(value: float) -> float:
    return max(value, MIN_LOGPROB)


JsonObject = dict[str, Any]

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


@dataclass(frozen=True)
class ResponseHeader:
    """What stands at the head of an object."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str | None = None

    def fields(self, object_type: str) -> JsonObject:
        head: JsonObject = {"id": self.id, "object": object_type, "created": self.created, "model": self.model}
        if self.system_fingerprint is not None:
            head["system_fingerprint"] = self.system_fingerprint
        return head


def chat_completion_object(
    stamp: ResponseHeader,
    parsed: ParsedRequest,
    dones: Sequence[Completion],
    texts: TokenTexts,
    *,
    with_cached_tokens: bool = True,
) -> JsonObject:
    """The answers to messages, a choice each. with_cached_tokens: tell how much of the prompt was found in the
    cache."""
    choices = [_chat_choice(index, parsed, done, texts) for index, done in enumerate(dones)]
    counts = usage_object(
        [done.metrics for done in dones], parsed.answers_per_prompt, with_cached_tokens=with_cached_tokens
    )
    return {**stamp.fields("chat.completion"), "choices": choices, "usage": counts}


def _chat_choice(index: int, asked: ParsedRequest, done: Completion, texts: TokenTexts) -> JsonObject:
    message: JsonObject = {
        "role": "assistant",
        "content": None if done.tool_calls and not done.text else done.text,
        "refusal": None,
        **reasoning_fields(done.reasoning),
    }
    if done.tool_calls:
        message["tool_calls"] = [tool_call_object(call) for call in done.tool_calls]
    return {
        "index": index,
        "message": message,
        "logprobs": None if asked.params.logprobs is None else chat_logprobs(done.logprobs, texts),
        "finish_reason": finish_reason_text(
            done.finish_reason, called=bool(done.tool_calls) and asked.tool_use.name is None
        ),
        "seed": done.seed,
    }


def text_completion_object(
    stamp: ResponseHeader,
    parsed: ParsedRequest,
    dones: Sequence[Completion],
    texts: TokenTexts,
    *,
    with_cached_tokens: bool = True,
) -> JsonObject:
    """The continuations of one or several texts, a choice each; of `best_of` the likeliest. with_cached_tokens:
    as in
    `chat_completion`."""
    choices = [
        {
            "index": index,
            "text": echo_text(parsed, done.prompt_ids, texts) + done.text,
            "logprobs": _text_logprobs(parsed, done, texts),
            "finish_reason": finish_reason_text(done.finish_reason),
            "seed": done.seed,
        }
        for index, done in enumerate(_told(parsed, dones))
    ]
    return {
        **stamp.fields("text_completion"),
        "choices": choices,
        "usage": usage_object(
            [done.metrics for done in dones], parsed.answers_per_prompt, with_cached_tokens=with_cached_tokens
        ),
    }


def _told(asked: ParsedRequest, dones: Sequence[Completion]) -> list[Completion]:
    """Of each prompt's answers the `n` with the highest log probability a token, the likeliest first."""
    if asked.best_of is None:
        return list(dones)
    groups = [
        dones[start : start + asked.answers_per_prompt] for start in range(0, len(dones), asked.answers_per_prompt)
    ]
    return [done for group in groups for done in sorted(group, key=_likelihood, reverse=True)[: asked.n]]


def _likelihood(done: Completion) -> float:
    """Mean log probability of a token; 0 of no token."""
    return sum(entry.logprob for entry in done.logprobs) / max(1, len(done.logprobs))


def _text_logprobs(asked: ParsedRequest, done: Completion, texts: TokenTexts) -> JsonObject | None:
    if asked.params.logprobs is None:
        return None
    prompt_ids = done.prompt_ids if asked.echo else ()
    return text_logprobs(with_prompt_tokens(prompt_ids, done.prompt_logprobs, done.logprobs), texts)


def echo_text(parsed: ParsedRequest, prompt_ids: Sequence[int], texts: TokenTexts) -> str:
    """What stands before an answer: with `echo` its prompt."""
    return texts.tokenizer.decode(prompt_ids) if parsed.echo else ""


def reasoning_fields(text: str) -> JsonObject:
    return {"reasoning_content": text, "reasoning": text} if text else {}


def tool_call_object(call: ToolCall) -> JsonObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_reason_text(reason: FinishReason, *, called: bool = False) -> str:
    """`tool_calls` where the model has called a function and ended its turn; as OpenAI has it, a call of the one
    function that had to be called counts as no choice of the model, and is a `stop`."""
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


def usage_object(metrics_list: Sequence[Metrics], each: int = 1, *, with_cached_tokens: bool = True) -> JsonObject:
    """Tokens of prompts and answers; an end token counts, as it was computed. A prompt counts once, however many
    answers were made of it. each: how many, one behind the other."""
    prompt = sum(metrics.prompt_tokens for metrics in metrics_list[::each])
    answer = sum(metrics.output_tokens for metrics in metrics_list)
    counts: JsonObject = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    if with_cached_tokens:
        found = sum(metrics.cached_tokens for metrics in metrics_list[::each])
        counts["prompt_tokens_details"] = {"cached_tokens": found}
    thoughts = sum(metrics.reasoning_tokens for metrics in metrics_list)
    counts["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return counts


def error_object(error: LocalLLMError) -> JsonObject:
    """`{"error": {...}}`; of a prompt that is too long it tells both numbers."""
    status = error.http_status
    kind = ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    found: JsonObject = {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": None}
    if isinstance(error, ContextOverflow):
        found |= {
            "code": "context_length_exceeded",
            "n_prompt_tokens": error.prompt_tokens,
            "n_ctx": error.context,
        }
    if isinstance(error, ModelNotFound):
        found |= {"code": "model_not_found", "param": "model"}
    return {"error": found}

"""Log probabilities in OpenAI's two shapes. They are of every token that was drawn: those of thoughts and markup,
and the one that ended the answer, are among them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from localllm.api.tokens import TokenTexts
from localllm.request import TokenLogprob

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

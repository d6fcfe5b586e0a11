"""Splits a text into the token windows on which models are measured. Needs no torch.

A window is what a model sees at once: `window` tokens of the text; the next window begins where it ends. If the
tokenizer adds BOS, the text's tokens follow one BOS, and BOS also replaces the first token of each later window,
so that every window begins with it. A window's first token is not scored, since nothing precedes it. These are the
windows of llama.cpp's `llama-perplexity`, except that it scores only the second half of each (`first=window // 2 +
1` does the same here) and omits a shorter last window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer

EVALUATION_TEXT = Path(__file__).with_name("evaluation.txt")
EVALUATION_NAME = "the project's evaluation text"
WINDOW_TOKENS = 512  # tokens, as in llama.cpp
MAX_TOKENS = 4096
MIN_SCORED_TOKENS = 64  # means of fewer tokens are meaningless


@dataclass(frozen=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]
    first_scored: int = 1  # index in each window of the first scored token

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def scored(self) -> int:
        return sum(len(window) - self.first_scored for window in self.ids)


def split_into_windows(
    text: str,
    tokenizer: Tokenizer,
    *,
    window: int = WINDOW_TOKENS,
    max_tokens: int = MAX_TOKENS,
    first_scored: int = 1,
) -> Windows:
    """max_tokens: maximum tokens of the text to use, including BOS; first_scored: as in `Windows`.

    Raises UsageError if the text is too short, or the numbers are invalid.
    """
    if not 0 < first_scored < window:
        raise UsageError(f"a window of {window} tokens is too small", f"use one of {first_scored + 1} or more")
    text_ids = tokenizer.encode(text, special=False)
    prefix = _before(tokenizer.encode(text), text_ids)
    stream = [*prefix, *text_ids][:max_tokens]
    starts = range(0, len(stream), window)
    ids = ((*prefix, *stream[start + len(prefix) : start + window]) for start in starts)
    windows = Windows(tuple(window_ids for window_ids in ids if len(window_ids) > first_scored), first_scored)
    if windows.scored < MIN_SCORED_TOKENS:
        raise UsageError(
            f"the text has {len(prefix) + len(text_ids)} tokens, of which {windows.scored} would be scored in "
            f"windows of {window} and {max_tokens} tokens in all",
            f"at least {MIN_SCORED_TOKENS} are needed: use a longer text, or leave out --tokens",
        )
    return windows


def _before(ids: Sequence[int], text_ids: Sequence[int]) -> list[int]:
    """Return the tokens added before a text: none or BOS; tokens added after it are ignored."""
    count = next((n for n in range(len(ids)) if ids[n : n + len(text_ids)] == text_ids), 0)
    return list(ids[:count])

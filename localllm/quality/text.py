"""From a text to the windows of tokens that models are measured on. Needs no torch.

A window is what a model sees at once: `window` tokens of the text, the next window begins where it ends. Where the
tokenizer puts BOS before a text, the text's tokens follow one BOS, and BOS also takes the place of the first token
of each later window, so that none is seen without it. A window's first token is not scored: nothing comes before
it. These are the windows of llama.cpp's `llama-perplexity`, but that it scores only the second half of each
(`first=window // 2 + 1` does the same here) and leaves out the last window where it is shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer

EVALUATION = Path(__file__).with_name("evaluation.txt")
EVALUATION_NAME = "the project's evaluation text"
WINDOW = 512  # tokens, llama.cpp's usual
MOST_TOKENS = 4096
LEAST_SCORED = 64  # tokens; means of fewer say nothing


@dataclass(frozen=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]
    first: int = 1  # the place in each window of the first token that is scored

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def scored(self) -> int:
        return sum(len(window) - self.first for window in self.ids)


def windows_of(
    text: str, tokenizer: Tokenizer, *, window: int = WINDOW, tokens: int = MOST_TOKENS, first: int = 1
) -> Windows:
    """tokens: how many of the text are looked at, at most, BOS among them; first: as in `Windows`.

    Raises UsageError where the text is too short, or the numbers make no sense.
    """
    if not 0 < first < window:
        raise UsageError(f"a window of {window} tokens is asked for", f"give one of {first + 1} or more")
    plain = tokenizer.encode(text, special=False)
    begin = _before(tokenizer.encode(text), plain)
    stream = [*begin, *plain][:tokens]
    starts = range(0, len(stream), window)
    ids = ((*begin, *stream[start + len(begin) : start + window]) for start in starts)
    found = Windows(tuple(one for one in ids if len(one) > first), first)
    if found.scored < LEAST_SCORED:
        raise UsageError(
            f"the text has {len(begin) + len(plain)} tokens, of which {found.scored} would be scored in windows "
            f"of {window} and {tokens} tokens in all",
            f"{LEAST_SCORED} at least are needed: give a longer text, or leave out --tokens",
        )
    return found


def _before(whole: Sequence[int], plain: Sequence[int]) -> list[int]:
    """What the tokenizer puts before a text: nothing or BOS; what it puts behind is left alone."""
    count = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return list(whole[:count])

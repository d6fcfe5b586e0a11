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

EVALUATION_TEXT = Path(__file__).with_name("evaluation.txt")
EVALUATION_NAME = "the project's evaluation text"
WINDOW_TOKENS = 512  # tokens, llama.cpp's usual
MAX_TOKENS = 4096
MIN_SCORED_TOKENS = 64  # tokens; means of fewer say nothing


@dataclass(frozen=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]
    first_scored: int = 1  # the place in each window of the first token that is scored

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
    """max_tokens: how many of the text are looked at, at most, BOS among them; first_scored: as in `Windows`.

    Raises UsageError where the text is too short, or the numbers make no sense.
    """
    if not 0 < first_scored < window:
        raise UsageError(f"a window of {window} tokens is asked for", f"give one of {first_scored + 1} or more")
    plain = tokenizer.encode(text, special=False)
    begin = _before(tokenizer.encode(text), plain)
    stream = [*begin, *plain][:max_tokens]
    starts = range(0, len(stream), window)
    ids = ((*begin, *stream[start + len(begin) : start + window]) for start in starts)
    found = Windows(tuple(one for one in ids if len(one) > first_scored), first_scored)
    if found.scored < MIN_SCORED_TOKENS:
        raise UsageError(
            f"the text has {len(begin) + len(plain)} tokens, of which {found.scored} would be scored in windows "
            f"of {window} and {max_tokens} tokens in all",
            f"{MIN_SCORED_TOKENS} at least are needed: give a longer text, or leave out --tokens",
        )
    return found


def _before(whole: Sequence[int], plain: Sequence[int]) -> list[int]:
    """What the tokenizer puts before a text: nothing or BOS; what it puts behind is left alone."""
    count = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return list(whole[:count])

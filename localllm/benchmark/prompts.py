"""Prompts that no cache knows: random tokens, or pieces of a text behind a random one."""

import random
from collections.abc import Collection, Sequence

from localllm.errors import UsageError


class PromptSource:
    """Token ids of one vocabulary; the same seed gives the same ones."""

    def __init__(self, vocab_size: int, special: Collection[int], seed: int, text: Sequence[int] | None = None):
        """special: tokens that no prompt is made of; text: ids to cut pieces from, None for random tokens."""
        self.tokens = [token for token in range(vocab_size) if token not in special]
        if len(self.tokens) < 2:
            raise UsageError(
                f"of {vocab_size} tokens all but {len(self.tokens)} are special", "name another model"
            )
        if text is not None and not text:
            raise UsageError("the text to cut prompts from is empty", "give a longer one")
        self.random = random.Random(seed)
        self.text = text

    def make_prompt(self, length: int) -> list[int]:
        """Begins with three random tokens, which make it another than all before but by chance: a cache finds
        what it knows from the begin on, never in the middle."""
        if self.text is None:
            return self.random.choices(self.tokens, k=length)
        begin = self.random.choices(self.tokens, k=min(3, length))
        at = self.random.randrange(len(self.text))
        return begin + [self.text[(at + i) % len(self.text)] for i in range(length - len(begin))]

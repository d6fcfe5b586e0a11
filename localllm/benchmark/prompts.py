"""Creates prompts that are not in any cache: random tokens, or parts of a text after a random prefix."""

import random
from collections.abc import Collection, Sequence

from localllm.errors import UsageError


class PromptSource:
    """Prompts from one vocabulary, reproducible by seed."""

    def __init__(self, vocab_size: int, special: Collection[int], seed: int, text: Sequence[int] | None = None):
        """special: tokens excluded from prompts; text: ids to take parts from, None for random tokens."""
        self.tokens = [token for token in range(vocab_size) if token not in special]
        if len(self.tokens) < 2:
            raise UsageError(
                f"of {vocab_size} tokens all but {len(self.tokens)} are special", "name another model"
            )
        if text is not None and not text:
            raise UsageError("the text for prompts is empty", "use a longer one")
        self.random = random.Random(seed)
        self.text = text

    def make_prompt(self, length: int) -> list[int]:
        """Return a prompt that begins with three random tokens, which almost surely makes it new: a cache matches
        prompts only from their beginning.
        """
        if self.text is None:
            return self.random.choices(self.tokens, k=length)
        prefix = self.random.choices(self.tokens, k=min(3, length))
        start = self.random.randrange(len(self.text))
        return prefix + [self.text[(start + i) % len(self.text)] for i in range(length - len(prefix))]

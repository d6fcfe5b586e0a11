"""Scenarios to measure: the numbers of prompt tokens, of cached tokens before them, and of concurrent streams.

Plain numbers, independent of models apart from their limits.
"""

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.plan.memory import BLOCK_SIZE, CACHED_CONTEXTS, MIN_RUNNING, RUNNING_TOKENS, blocks_for

DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = (
    512,
    24,
)  # tokens by default, if the model's context allows
MAX_TOKENS = 2**31 - 1  # the limit in `request.py`
MAX_SCENARIOS = 1000


@dataclass(frozen=True)
class Scenario:
    """Lengths are in tokens per stream."""

    prompt: int  # computed during the measurement
    depth: int  # computed before, and found in the cache
    batch: int  # concurrent streams
    output: int

    def __str__(self) -> str:
        """Return, for example, `4 x 512+32 at 2048`."""
        streams = f"{self.batch} x " if self.batch > 1 else ""
        return f"{streams}{self.prompt}+{self.output}" + (f" at {self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Final length of one stream."""
        return self.depth + self.prompt + self.output

    @property
    def blocks(self) -> int:
        """Cache blocks needed for all streams, and to run so many of them at once."""
        running_blocks = blocks_for(self.batch * RUNNING_TOKENS) if self.batch > MIN_RUNNING else 0
        return max(self.batch * blocks_for(self.tokens), running_blocks)


@dataclass(frozen=True)
class ScenarioGrid:
    """The values given as lists; None for the default."""

    prompts: tuple[int, ...] | None = None
    depths: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] | None = None

    def scenarios(self, max_context: int) -> list[Scenario]:
        """Return all combinations. Default lengths shrink to a smaller context; requested lengths do not."""
        deepest = max((depth for depth in self.depths if depth < max_context - 1), default=0)
        outputs = self.outputs or (max(1, min(DEFAULT_OUTPUT_TOKENS, (max_context - deepest) // 4)),)
        prompts = self.prompts or (max(1, min(DEFAULT_PROMPT_TOKENS, max_context - deepest - max(outputs))),)
        combinations = itertools.product(prompts, self.depths, self.batches, outputs)
        scenarios = list(dict.fromkeys(itertools.starmap(Scenario, combinations)))
        if len(scenarios) > MAX_SCENARIOS:
            raise UsageError(f"these lists give {len(scenarios)} scenarios", f"request at most {MAX_SCENARIOS}")
        return scenarios


def parse_numbers(text: str | None, flag: str, minimum: int = 1) -> tuple[int, ...] | None:
    """Parse `128,512`; None stays None. Raises UsageError for anything but integers of at least `minimum`."""
    if text is None:
        return None
    numbers = []
    for word in text.split(","):
        if not (word.strip().isdecimal() and minimum <= int(word) <= MAX_TOKENS):
            raise UsageError(
                f"{flag} contains {word.strip()!r}", f"give whole numbers from {minimum}, as in 128,512"
            )
        numbers.append(int(word))
    return tuple(numbers)


def unrunnable_reason(scenario: Scenario, max_context: int, max_running: int) -> str | None:
    """Return why a scenario can run with no amount of memory, or None. max_running: streams of a step"""
    if scenario.batch > max_running:
        return f"the engine runs at most {max_running} streams at once"
    if scenario.tokens > max_context:
        return f"{scenario.tokens} tokens per stream, but the model supports {max_context}"
    return None


def required_context(scenarios: Sequence[Scenario], max_context: int) -> int:
    """Return the context in tokens with which to load the model, so that its cache holds all streams of any
    scenario.
    """
    longest = max(scenario.tokens for scenario in scenarios)
    blocks = max(-(-scenario.blocks // CACHED_CONTEXTS) for scenario in scenarios)
    return min(max_context, max(longest, blocks * BLOCK_SIZE))


class PromptSource:
    """Prompts in no cache: random tokens, or parts of a text after a random prefix; reproducible by seed."""

    def __init__(self, vocab_size: int, special: Collection[int], seed: int, text: Sequence[int] | None = None):
        """special: tokens excluded from prompts; text: ids to take parts from, None for random tokens."""
        self.tokens = [token for token in range(vocab_size) if token not in special]
        if len(self.tokens) < 2:
            raise UsageError(
                f"only {len(self.tokens)} of {vocab_size} tokens are not special", "use another model"
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

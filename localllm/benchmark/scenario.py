"""What is measured: prompts of so many tokens behind so many in the cache, so many at once. Plain numbers;
knows no model but its limits."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.plan.memory import BLOCK_SIZE, CACHED_CONTEXTS, MAX_RUNNING, blocks_for

DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = (
    512,
    24,
)  # tokens, where nobody says and the model's context holds them
MAX_TOKENS = 2**31 - 1  # as `request.py` counts
MAX_SCENARIOS = 1000


@dataclass(frozen=True)
class Scenario:
    """Lengths are tokens, of each stream."""

    prompt: int  # computed while the clock runs
    depth: int  # computed before, and found in the cache
    batch: int  # streams that are answered at once
    output: int

    def __str__(self) -> str:
        """As `4 x 512+32 at 2048`."""
        streams = f"{self.batch} x " if self.batch > 1 else ""
        return f"{streams}{self.prompt}+{self.output}" + (f" at {self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """Of one stream at its end."""
        return self.depth + self.prompt + self.output

    @property
    def blocks(self) -> int:
        """Of the cache, for all streams."""
        return self.batch * blocks_for(self.tokens)


@dataclass(frozen=True)
class ScenarioGrid:
    """What a person gave as lists; None: the usual."""

    prompts: tuple[int, ...] | None = None
    depths: tuple[int, ...] = (0,)
    batches: tuple[int, ...] = (1,)
    outputs: tuple[int, ...] | None = None

    def scenarios(self, max_context: int) -> list[Scenario]:
        """Each with each. The usual lengths give way to a model that knows less; what is asked for does not."""
        beside = max((depth for depth in self.depths if depth < max_context - 1), default=0)
        outputs = self.outputs or (max(1, min(DEFAULT_OUTPUT_TOKENS, (max_context - beside) // 4)),)
        prompts = self.prompts or (max(1, min(DEFAULT_PROMPT_TOKENS, max_context - beside - max(outputs))),)
        chosen = itertools.product(prompts, self.depths, self.batches, outputs)
        found = list(dict.fromkeys(itertools.starmap(Scenario, chosen)))
        if len(found) > MAX_SCENARIOS:
            raise UsageError(f"these lists make {len(found)} scenarios", f"ask for {MAX_SCENARIOS} at most")
        return found


def parse_numbers(text: str | None, flag: str, minimum: int = 1) -> tuple[int, ...] | None:
    """`128,512` as numbers; None stays None. Raises UsageError where one is no whole number or too small."""
    if text is None:
        return None
    found = []
    for word in text.split(","):
        if not (word.strip().isdecimal() and minimum <= int(word) <= MAX_TOKENS):
            raise UsageError(f"{flag} holds {word.strip()!r}", f"give whole numbers from {minimum}, as in 128,512")
        found.append(int(word))
    return tuple(found)


def unrunnable_reason(scenario: Scenario, max_context: int) -> str | None:
    """Why no memory would do for it, None where one may."""
    if scenario.batch > MAX_RUNNING:
        return f"the engine answers {MAX_RUNNING} streams at once"
    if scenario.tokens > max_context:
        return f"{scenario.tokens} tokens a stream, and the model knows {max_context}"
    return None


def required_context(scenarios: Sequence[Scenario], max_context: int) -> int:
    """What to load the model with, so that its cache holds all streams of any of them, in tokens."""
    longest = max(scenario.tokens for scenario in scenarios)
    blocks = max(-(-scenario.blocks // CACHED_CONTEXTS) for scenario in scenarios)
    return min(max_context, max(longest, blocks * BLOCK_SIZE))

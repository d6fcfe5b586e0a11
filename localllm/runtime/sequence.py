"""One request while it is being answered."""

from collections import Counter
from dataclasses import dataclass, field

from localllm.metrics import Stopwatch
from localllm.request import Request
from localllm.runtime.state import SequenceState


@dataclass(eq=False)
class Sequence:
    """Tokens that are known (prompt and answer) and how many of them are computed.

    `unread` counts tokens that were sampled on the device and not yet read by the host: 0 or 1.
    """

    request: Request
    seed: int
    eos_ids: frozenset[int]
    limit: int  # most tokens of prompt and answer together
    stopwatch: Stopwatch
    token_ids: list[int] = field(default_factory=list)
    unread: int = 0
    row: int = -1  # where its newest token lies on the device
    state: SequenceState | None = None  # None: waiting
    cached_tokens: int | None = None  # of the prompt, found in the KV cache when it was first admitted
    output_counts: Counter[int] = field(default_factory=Counter)
    prompt_told: int = 0  # prompt positions whose log probabilities were asked for and computed
    finished: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def computed(self) -> int:
        return self.state.length if self.state else 0

    @property
    def pending(self) -> int:
        """How many tokens are known, here or on the device, and not computed: *the* definition of work."""
        return len(self.token_ids) + self.unread - self.computed

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def needs_host_token(self) -> bool:
        """Its next token can only be sampled when the last one has been read: penalties count tokens."""
        return self.request.params.counts_tokens

    @property
    def reads_whole_prompt(self) -> bool:
        """Prompt log probabilities need every prompt position computed, none taken from the cache."""
        return self.request.params.prompt_logprobs is not None

    @property
    def wants_answer(self) -> bool:
        return self.limit > self.prompt_length

    @property
    def ends_unread(self) -> bool:
        """Is the last of its computed tokens known to the device alone?"""
        return self.computed > len(self.token_ids)

    def last_computed(self, count: int) -> list[int]:
        """The tokens that the last `count` computed positions hold, 0 for the unread one."""
        known = self.token_ids[self.computed - count : self.computed]
        return [*known, 0] if self.ends_unread else known

    def save_state(self, count: int) -> None:
        """Have the recurrent state saved at the last block boundary among the last `count` computed tokens. Of an
        answer only the newest is kept: what comes next continues it, or begins anew at the prompt."""
        state = self.state
        if state is None or not state.pool.recurrent:
            return
        boundary = self.computed - self.computed % state.pool.block_size
        if boundary > self.computed - count:
            state.save(boundary, rolling=boundary > self.prompt_length)

    def tell_prompt(self, count: int) -> range:
        """Those of the last `count` computed positions whose prompt log probabilities are asked for and not told
        yet; they are told now. What a preempted sequence computes again is not told again."""
        if not self.reads_whole_prompt:
            return range(0)
        first = max(self.computed - count, self.prompt_told)
        self.prompt_told = max(first, min(self.computed, self.prompt_length - 1))
        return range(first, self.prompt_told)

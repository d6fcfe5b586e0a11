"""One request while it is being answered."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from localllm.metrics import Stopwatch
from localllm.request import Request
from localllm.runtime.constraint import Constraint
from localllm.runtime.sampler import Row
from localllm.runtime.state import SequenceState


@dataclass(eq=False)
class Sequence:
    """Tokens that are known (prompt and answer) and how many of them are computed.

    `unread` counts tokens that were sampled on the device and not yet read by the host: 0 or 1. `drafts` are
    guesses of what comes behind the known ones: one step computes them all, and tells how many of them are right.
    """

    request: Request
    seed: int
    eos_ids: frozenset[int]
    limit: int  # most tokens of prompt and answer together
    stopwatch: Stopwatch
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    proposals: Tensor | None = None  # [drafts, vocab] float32, what each was drawn from; None: of mere guesses
    filling: int = 0  # so many of the last drafts stand for nothing: they make steps of a width that is captured
    unread: int = 0
    row: int = -1  # where its newest token lies on the device
    state: SequenceState | None = None  # None: waiting
    cached_tokens: int | None = None  # of the prompt, found in the KV cache when it was first admitted
    passed: int = 0  # so many were admitted before it that had come later
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
        """How many tokens are known, here or on the device, or guessed, and not computed: *the* definition of
        work."""
        return len(self.token_ids) + self.unread + len(self.drafts) - self.computed

    @property
    def was_admitted(self) -> bool:
        return self.cached_tokens is not None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def room(self) -> int:
        """How many draft tokens could come before the last that there is a place for."""
        return self.limit - len(self.token_ids) - 1

    @property
    def needs_host_token(self) -> bool:
        """What comes next can only be told when the last step has been read, which may have brought any number of
        tokens, or one that a grammar goes on from."""
        return bool(self.drafts) or self.constraint is not None

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
        return self.computed > len(self.token_ids) + len(self.drafts)

    def last_computed(self, count: int) -> list[int]:
        """The tokens that the last `count` computed positions hold, 0 for the unread one."""
        begin = self.computed - count
        known = self.token_ids[begin : self.computed]
        if self.drafts:
            known += self.drafts[max(0, begin - len(self.token_ids)) :]
        return [*known, 0] if self.ends_unread else known

    def save_state(self, count: int) -> None:
        """Of the last `count` computed tokens, as `SequenceState.save_steps`: before each draft, too."""
        if self.state:
            drafted = range(len(self.token_ids), self.computed) if self.drafts else ()
            self.state.save_steps(count, self.prompt_length, drafted)

    def rows(self) -> list[Row]:
        """What the tokens behind its newest one and behind each draft are drawn by, as if the drafts stood."""
        masks = self.constraint.begin(self.drafts) if self.constraint else None
        params, known, counts, rows = self.request.params, self.token_ids, self.output_counts, []
        for place in range(1 + len(self.drafts)):
            if place and params.counts_tokens:
                known = [*known, self.drafts[place - 1]]
                counts = counts + Counter(known[-1:])
            position = self.computed - len(self.drafts) + place
            proposal = None
            if self.proposals is not None and place < len(self.drafts):
                proposal = self.drafts[place], self.proposals[place]
            rows.append(Row(params, self.seed, position, known, counts, self.row, masks, place, proposal))
        return rows

    def forget_drafts(self) -> None:
        """They are verified together or not at all."""
        self.drafts, self.proposals, self.filling = [], None, 0

    def tell_prompt(self, count: int) -> range:
        """Those of the last `count` computed positions whose prompt log probabilities are asked for and not told
        yet; they are told now. What a preempted sequence computes again is not told again."""
        if not self.reads_whole_prompt:
            return range(0)
        first = max(self.computed - count, self.prompt_told)
        self.prompt_told = max(first, min(self.computed, self.prompt_length - 1))
        return range(first, self.prompt_told)

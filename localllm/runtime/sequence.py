"""One request while it is being answered."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from localllm.metrics import Stopwatch
from localllm.request import Request
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.sampler import Constraint, SamplingSpec


@dataclass(eq=False)
class Sequence:
    """Tokens that are known (prompt and answer) and how many of them are computed.

    `unread` counts tokens that were sampled on the device and not yet read by the host: 0 or 1. `drafts` are
    guesses of what comes behind the known ones: one step computes them all, and tells how many of them are right.
    """

    request: Request
    seed: int
    eos_ids: frozenset[int]
    max_len: int  # most tokens of prompt and answer together
    stopwatch: Stopwatch
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: Tensor | None = None  # [drafts, vocab] float32, what each was drawn from; None: of mere guesses
    padding_draft_count: int = (
        0  # so many of the last drafts stand for nothing: they make steps of a width that is captured
    )
    unread_count: int = 0
    token_slot: int = -1  # where its newest token lies on the device
    state: SequenceState | None = None  # None: waiting
    cached_tokens: int | None = None  # of the prompt, found in the KV cache when it was first admitted
    passed_count: int = 0  # so many were admitted before it that had come later
    output_counts: Counter[int] = field(default_factory=Counter)
    prompt_logprobs_done: int = 0  # prompt positions whose log probabilities were asked for and computed
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
        return len(self.token_ids) + self.unread_count + len(self.draft_ids) - self.computed

    @property
    def was_admitted(self) -> bool:
        return self.cached_tokens is not None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_drafts(self) -> int:
        """How many draft tokens could come before the last that there is a place for."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def needs_host_token(self) -> bool:
        """What comes next can only be told when the last step has been read, which may have brought any number of
        tokens, or one that a grammar goes on from."""
        return bool(self.draft_ids) or self.constraint is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Prompt log probabilities need every prompt position computed, none taken from the cache."""
        return self.request.params.prompt_logprobs is not None

    @property
    def wants_answer(self) -> bool:
        return self.max_len > self.prompt_len

    @property
    def ends_with_unread(self) -> bool:
        """Is the last of its computed tokens known to the device alone?"""
        return self.computed > len(self.token_ids) + len(self.draft_ids)

    def last_computed_ids(self, count: int) -> list[int]:
        """The tokens that the last `count` computed positions hold, 0 for the unread one."""
        begin = self.computed - count
        known = self.token_ids[begin : self.computed]
        if self.draft_ids:
            known += self.draft_ids[max(0, begin - len(self.token_ids)) :]
        return [*known, 0] if self.ends_with_unread else known

    def plan_state_saves(self, count: int) -> None:
        """Of the last `count` computed tokens, as `SequenceState.save_steps`: before each draft, too."""
        if self.state:
            drafted = range(len(self.token_ids), self.computed) if self.draft_ids else ()
            self.state.plan_saves(count, self.prompt_len, drafted)

    def sampling_specs(self) -> list[SamplingSpec]:
        """What the tokens behind its newest one and behind each draft are drawn by, as if the drafts stood."""
        masks = self.constraint.begin(self.draft_ids) if self.constraint else None
        params, known, counts, rows = self.request.params, self.token_ids, self.output_counts, []
        for place in range(1 + len(self.draft_ids)):
            if place and params.uses_penalties:
                known = [*known, self.draft_ids[place - 1]]
                counts = counts + Counter(known[-1:])
            position = self.computed - len(self.draft_ids) + place
            proposal = None
            if self.draft_probs is not None and place < len(self.draft_ids):
                proposal = self.draft_ids[place], self.draft_probs[place]
            rows.append(
                SamplingSpec(params, self.seed, position, known, counts, self.token_slot, masks, place, proposal)
            )
        return rows

    def clear_drafts(self) -> None:
        """They are verified together or not at all."""
        self.draft_ids, self.draft_probs, self.padding_draft_count = [], None, 0

    def take_prompt_positions(self, count: int) -> range:
        """Those of the last `count` computed positions whose prompt log probabilities are asked for and not told
        yet; they are told now. What a preempted sequence computes again is not told again."""
        if not self.needs_whole_prompt:
            return range(0)
        first = max(self.computed - count, self.prompt_logprobs_done)
        self.prompt_logprobs_done = max(first, min(self.computed, self.prompt_len - 1))
        return range(first, self.prompt_logprobs_done)

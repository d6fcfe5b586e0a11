"""A request while it is being answered."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from localllm.metrics import Stopwatch
from localllm.request import Request
from localllm.runtime.kv_cache.lower_tier import PrefixLoad
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.sampler import Constraint, SamplingSpec


@dataclass(eq=False)
class Sequence:
    """Known tokens (prompt and answer) and how many of them are computed.

    `unread_count` is the number of tokens that were sampled on the device and not yet read by the host: 0 or 1.
    `draft_ids` are guesses at the tokens that follow: one step computes and verifies them all.
    """

    request: Request
    seed: int
    eos_ids: frozenset[int]
    max_len: int  # maximum tokens of prompt and answer together
    stopwatch: Stopwatch
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: Tensor | None = None  # [drafts, vocab] float32, the distribution of each draft; None: not sampled
    padding_draft_count: int = 0  # trailing drafts that only pad the step to a captured width
    unread_count: int = 0
    awaits_token: bool = False  # from a step that is not read, and has no further work until then
    token_slot: int = -1  # index of its newest token on the device
    state: SequenceState | None = None  # None: waiting
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
    prefix_load: PrefixLoad | None = None  # from the lower tier, once it was tried
    load_blocks: int = 0  # reserved while that is under way
    passed_count: int = 0  # sequences that arrived later and were admitted first
    output_counts: Counter[int] = field(default_factory=Counter)
    prompt_logprobs_done: int = 0  # prompt positions whose requested log probabilities are computed
    finished: bool = False
    end_ids: tuple[int, ...] = field(init=False)  # tokens that end the answer
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.prompt_len = len(self.token_ids)
        params = self.request.params
        self.end_ids = tuple(sorted({*params.stop_ids, *(() if params.ignore_eos else self.eos_ids)}))

    @property
    def computed(self) -> int:
        return self.state.length if self.state else 0

    @property
    def pending(self) -> int:
        """Return how many tokens are known or guessed and not computed: *the* definition of work."""
        known = len(self.token_ids) + self.unread_count + len(self.draft_ids)
        return known - self.state.length if self.state else known  # not `computed`: this is read most of all

    @property
    def was_admitted(self) -> bool:
        return self.cached_tokens is not None

    @property
    def is_loading(self) -> bool:
        """Return whether a part of its prefix is being loaded from a lower tier."""
        return self.prefix_load is not None and not self.prefix_load.done

    @property
    def disk_tokens(self) -> int:
        """Those of the cached tokens that were read from the disk for this sequence."""
        return min(self.prefix_load.tokens, self.cached_tokens or 0) if self.prefix_load else 0

    @property
    def measured_prefill(self) -> tuple[int, float]:
        """Computed tokens of the prompt, and the seconds that they took; (0, 0.0) if unknown."""
        watch = self.stopwatch
        if watch.scheduled is None or not watch.token_times:
            return 0, 0.0
        return self.prompt_len - (self.cached_tokens or 0), watch.token_times[0] - watch.scheduled

    @property
    def max_drafts(self) -> int:
        """Maximum number of draft tokens that fit before the last position of the sequence."""
        return self.max_len - len(self.token_ids) - 1

    @property
    def needs_host_token(self) -> bool:
        """Return whether the last step must be read first: it may yield any number of tokens, or feed a
        grammar.
        """
        return bool(self.draft_ids) or self.constraint is not None

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether prompt log probabilities are requested, which need every position computed, not
        cached.
        """
        return self.request.params.prompt_logprobs is not None

    @property
    def wants_answer(self) -> bool:
        return self.max_len > self.prompt_len

    @property
    def ends_with_unread(self) -> bool:
        """Return whether the last computed token is known to the device alone."""
        return self.computed > len(self.token_ids) + len(self.draft_ids)

    def last_computed_ids(self, count: int) -> list[int]:
        """Return the tokens at the last `count` computed positions, with 0 for an unread one."""
        computed = self.computed
        begin = computed - count
        known = self.token_ids[begin:computed]
        if self.draft_ids:
            known += self.draft_ids[max(0, begin - len(self.token_ids)) :]
        return [*known, 0] if len(known) < count else known

    def plan_state_saves(self, count: int) -> None:
        """Plan state saves within the last `count` computed tokens, including one before each draft."""
        if self.state and self.state.pool.recurrent:
            drafted = range(len(self.token_ids), self.computed) if self.draft_ids else ()
            self.state.plan_saves(count, self.prompt_len, drafted)

    def sampling_specs(self) -> list[SamplingSpec]:
        """Return how to sample behind the newest token and behind each draft, assuming that the drafts are
        right.
        """
        masks = self.constraint.begin(self.draft_ids) if self.constraint else None
        params, token_ids, counts = self.request.params, self.token_ids, self.output_counts
        if not self.draft_ids:
            position = self.computed
            forbidden_ids = self.forbidden_ids(position)
            return [
                SamplingSpec(
                    params, self.seed, position, token_ids, counts, self.token_slot, masks, 0, forbidden_ids
                )
            ]
        specs: list[SamplingSpec] = []
        for index in range(1 + len(self.draft_ids)):
            if index and params.uses_penalties:
                token_ids = [*token_ids, self.draft_ids[index - 1]]
                counts = counts + Counter(token_ids[-1:])
            position = self.computed - len(self.draft_ids) + index
            proposal = None
            if self.draft_probs is not None and index < len(self.draft_ids):
                proposal = self.draft_ids[index], self.draft_probs[index]
            specs.append(
                SamplingSpec(
                    params,
                    self.seed,
                    position,
                    token_ids,
                    counts,
                    self.token_slot,
                    masks,
                    index,
                    forbidden_ids=self.forbidden_ids(position),
                    draft_and_probs=proposal,
                )
            )
        return specs

    def forbidden_ids(self, position: int) -> tuple[int, ...]:
        """Return the end tokens if the answer may not end with the token at this position."""
        return self.end_ids if position - self.prompt_len < self.request.params.min_tokens else ()

    def clear_drafts(self) -> None:
        """Drop all drafts: they are verified together or not at all."""
        self.draft_ids, self.draft_probs, self.padding_draft_count = [], None, 0

    def take_prompt_positions(self, count: int) -> range:
        """Return those of the last `count` computed positions whose prompt log probabilities are due, and mark
        them done.

        Positions that a preempted sequence recomputes are not reported again.
        """
        if not self.needs_whole_prompt:
            return range(0)
        first = max(self.computed - count, self.prompt_logprobs_done)
        self.prompt_logprobs_done = max(first, min(self.computed, self.prompt_len - 1))
        return range(first, self.prompt_logprobs_done)

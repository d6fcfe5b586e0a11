"""A sequence as a draft model computes it: the same tokens, a separate state, and draft tokens behind them."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.sampler import SamplingSpec
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.acceptance_rate import AcceptanceRate


@dataclass(eq=False)
class DraftSequence:
    """`draft_ids` follow the first `verified_len` tokens, until `sync` is called after verification."""

    sequence: Sequence
    pool: BlockPool
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    state: SequenceState | None = None  # None: nothing is computed
    verified_len: int = 0
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)  # [vocab] each, the distributions of sampled drafts
    max_drafts: int = 0  # for the current step
    joint_chance: float = 1.0  # probability that all drafts are right, according to the draft model

    @property
    def pending(self) -> int:
        computed = self.state.length if self.state else 0
        return len(self.sequence.token_ids) + len(self.draft_ids) - computed

    @property
    def shares_seed(self) -> bool:
        """Whether drafts are sampled with the same random numbers as the target uses.

        Then a seed gives the same text with and without drafts, at the price of a lower acceptance rate.
        """
        return self.sequence.request.params.seed is not None

    @property
    def is_sampled(self) -> bool:
        """Whether drafts are sampled, and verified against their distributions."""
        return self.sequence.request.params.temperature > 0 and not self.shares_seed

    def sync(self, max_drafts: int) -> None:
        """Drop the drafts that were not accepted, and prepare for up to `max_drafts` new ones."""
        tokens = self.sequence.token_ids
        if self.state is None:
            self.state = SequenceState(self.pool, tokens)
        valid_len = len(tokens) - 1  # the newest token is always computed, for its logits
        if self.draft_ids:
            pairs = zip(self.draft_ids, tokens[self.verified_len :], strict=False)
            accepted = next(
                (i for i, (guess, token) in enumerate(pairs) if guess != token), len(tokens) - self.verified_len
            )
            valid_len = min(valid_len, self.verified_len + accepted)
        self.state.rollback(min(self.state.length, valid_len))
        self.state.cache_full_blocks(tokens)
        self.verified_len, self.draft_ids, self.draft_probs = len(tokens), [], []
        self.max_drafts, self.joint_chance = max_drafts, 1.0

    def extend(self, count: int) -> list[int]:
        """Allocate slots for the next `count` tokens and return them. Raises OutOfBlocks.

        Saves the state of recurrent layers at block boundaries and before each draft.
        """
        assert self.state
        begin, state = self.state.length, self.state
        state.extend(count)
        is_drafting = state.length >= self.verified_len  # the last of these tokens is followed by a draft
        state.plan_saves(count, self.sequence.prompt_len, (state.length,) if is_drafting else ())
        drafts = self.draft_ids[max(0, begin - self.verified_len) :]
        return [*self.sequence.token_ids[begin : state.length], *drafts]

    def sampling_spec(self) -> SamplingSpec:
        """Return how to sample the next draft, assuming that the drafts before it are right."""
        s, params = self.sequence, self.sequence.request.params
        tokens, counts = s.token_ids, s.output_counts
        if params.uses_penalties and self.draft_ids:
            tokens, counts = [*tokens, *self.draft_ids], counts + Counter(self.draft_ids)
        return SamplingSpec(params, s.seed, self.verified_len + len(self.draft_ids), tokens, counts)

    def add_sampled(self, token: int | None, weights: Tensor) -> None:
        """Add a sampled draft with its weights [vocab]; None: the weights were not finite or all zero."""
        if token is None:
            self.max_drafts = len(self.draft_ids)
        else:
            self.draft_ids.append(token)
            self.draft_probs.append(weights)

    def add_greedy(self, token: int, chance: float, verify_cost: float, extend_cost: float) -> None:
        """Add a greedy draft if it is worth verifying.

        chance: its probability according to the draft model; verify_cost: cost of verifying it, extend_cost: cost
        of also drafting another token, both in plain steps.
        """
        # Then the token's probability does not predict acceptance.
        is_sampled = self.sequence.request.params.temperature > 0
        self.joint_chance *= 1.0 if is_sampled else chance
        is_worth = token >= 0 and self.joint_chance >= verify_cost
        if is_worth:
            self.draft_ids.append(token)
        if not is_worth or self.joint_chance < extend_cost:
            self.max_drafts = len(self.draft_ids)

    def publish_drafts(self) -> None:
        """Set the drafts of the sequence."""
        self.sequence.draft_ids = list(self.draft_ids)
        self.sequence.draft_probs = torch.stack(self.draft_probs) if self.draft_probs else None

    def free(self) -> None:
        if self.state:
            self.state.free()
            self.state = None
        self.draft_ids, self.draft_probs = [], []

"""A sequence as a draft model computes it: the same tokens, a state of its own, and guesses behind them."""

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
    """`guesses` stand behind the first `begun` tokens until it is told by `catch_up` how the sequence went on."""

    sequence: Sequence
    pool: BlockPool
    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    state: SequenceState | None = None  # None: nothing is computed
    verified_len: int = 0
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)  # [vocab] each, what drawn guesses were drawn from
    max_drafts: int = 0  # guesses that are wanted now
    joint_chance: float = 1.0  # the chance that all of them are right, as the model sees it

    @property
    def pending(self) -> int:
        computed = self.state.length if self.state else 0
        return len(self.sequence.token_ids) + len(self.draft_ids) - computed

    @property
    def shares_seed(self) -> bool:
        """Are its guesses made with the very numbers that the target draws by, so that a seed gives one text
        whatever is guessed, at the price of fewer that are right?"""
        return self.sequence.request.params.seed is not None

    @property
    def is_sampled(self) -> bool:
        """Are guesses drawn, to be verified against what they were drawn from?"""
        return self.sequence.request.params.temperature > 0 and not self.shares_seed

    def sync(self, max_drafts: int) -> None:
        """Forget what was guessed and did not come, and begin to guess up to `max_drafts` tokens."""
        tokens = self.sequence.token_ids
        if self.state is None:
            self.state = SequenceState(self.pool, tokens)
        stands = len(tokens) - 1  # the newest is computed for what comes next
        if self.draft_ids:
            came = zip(self.draft_ids, tokens[self.verified_len :], strict=False)
            right = next(
                (i for i, (guess, token) in enumerate(came) if guess != token), len(tokens) - self.verified_len
            )
            stands = min(stands, self.verified_len + right)
        self.state.rollback(min(self.state.length, stands))
        self.state.cache_full_blocks(tokens)
        self.verified_len, self.draft_ids, self.draft_probs = len(tokens), [], []
        self.max_drafts, self.joint_chance = max_drafts, 1.0

    def extend(self, count: int) -> list[int]:
        """Make room for the next `count` tokens that are not computed: which they are. Raises OutOfBlocks.

        Of recurrent layers the state is saved where later turns find it, and before each guess.
        """
        assert self.state
        begin, state = self.state.length, self.state
        state.extend(count)
        guessing = state.length >= self.verified_len  # behind these tokens
        state.plan_saves(count, self.sequence.prompt_len, (state.length,) if guessing else ())
        guessed = self.draft_ids[max(0, begin - self.verified_len) :]
        return [*self.sequence.token_ids[begin : state.length], *guessed]

    def sampling_spec(self) -> SamplingSpec:
        """What the next guess is drawn by, as if those before it stood."""
        s, params = self.sequence, self.sequence.request.params
        tokens, counts = s.token_ids, s.output_counts
        if params.uses_penalties and self.draft_ids:
            tokens, counts = [*tokens, *self.draft_ids], counts + Counter(self.draft_ids)
        return SamplingSpec(params, s.seed, self.verified_len + len(self.draft_ids), tokens, counts)

    def add_sampled(self, token: int | None, weights: Tensor) -> None:
        """The next guess and what it was drawn from, [vocab]; None: there was nothing to draw from."""
        if token is None:
            self.max_drafts = len(self.draft_ids)
        else:
            self.draft_ids.append(token)
            self.draft_probs.append(weights)

    def add_greedy(self, token: int, chance: float, verify_cost: float, extend_cost: float) -> None:
        """The next guess, if it is one, and worth being verified. chance: as the model sees it; in plain steps,
        verify_cost: what that costs, extend_cost: and to have made one more, too."""
        is_sampled = self.sequence.request.params.temperature > 0  # then likely tokens are not all that comes
        self.joint_chance *= 1.0 if is_sampled else chance
        worth = token >= 0 and self.joint_chance >= verify_cost
        if worth:
            self.draft_ids.append(token)
        if not worth or self.joint_chance < extend_cost:
            self.max_drafts = len(self.draft_ids)

    def publish_drafts(self) -> None:
        """The sequence drafts what was guessed."""
        self.sequence.draft_ids = list(self.draft_ids)
        self.sequence.draft_probs = torch.stack(self.draft_probs) if self.draft_probs else None

    def free(self) -> None:
        if self.state:
            self.state.free()
            self.state = None
        self.draft_ids, self.draft_probs = [], []

"""A sequence as a draft model computes it: the same tokens, a state of its own, and guesses behind them."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.runtime.sampler import Row
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.pace import Chance
from localllm.runtime.state import BlockPool, SequenceState


@dataclass(eq=False)
class Follower:
    """`guesses` stand behind the first `begun` tokens until it is told by `catch_up` how the sequence went on."""

    sequence: Sequence
    pool: BlockPool
    chance: Chance = field(default_factory=Chance)
    state: SequenceState | None = None  # None: nothing is computed
    begun: int = 0
    guesses: list[int] = field(default_factory=list)
    proposals: list[Tensor] = field(default_factory=list)  # [vocab] each, what drawn guesses were drawn from
    most: int = 0  # guesses that are wanted now
    reach: float = 1.0  # the chance that all of them are right, as the model sees it

    @property
    def pending(self) -> int:
        computed = self.state.length if self.state else 0
        return len(self.sequence.token_ids) + len(self.guesses) - computed

    @property
    def is_coupled(self) -> bool:
        """Are its guesses made with the very numbers that the target draws by, so that a seed gives one text
        whatever is guessed, at the price of fewer that are right?"""
        return self.sequence.request.params.seed is not None

    @property
    def is_drawn(self) -> bool:
        """Are guesses drawn, to be verified against what they were drawn from?"""
        return self.sequence.request.params.temperature > 0 and not self.is_coupled

    def catch_up(self, most: int) -> None:
        """Forget what was guessed and did not come, and begin to guess up to `most` tokens."""
        tokens = self.sequence.token_ids
        if self.state is None:
            self.state = SequenceState(self.pool, tokens)
        stands = len(tokens) - 1  # the newest is computed for what comes next
        if self.guesses:
            came = zip(self.guesses, tokens[self.begun :], strict=False)
            right = next((i for i, (guess, token) in enumerate(came) if guess != token), len(tokens) - self.begun)
            stands = min(stands, self.begun + right)
        self.state.rollback(min(self.state.length, stands))
        self.state.remember(tokens)
        self.begun, self.guesses, self.proposals = len(tokens), [], []
        self.most, self.reach = most, 1.0

    def extend(self, count: int) -> list[int]:
        """Make room for the next `count` tokens that are not computed: which they are. Raises OutOfBlocks.

        Of recurrent layers the state is saved where later turns find it, and before each guess.
        """
        assert self.state
        begin, state = self.state.length, self.state
        state.extend(count)
        guessing = state.length >= self.begun  # behind these tokens
        state.save_steps(count, self.sequence.prompt_length, (state.length,) if guessing else ())
        guessed = self.guesses[max(0, begin - self.begun) :]
        return [*self.sequence.token_ids[begin : state.length], *guessed]

    def row(self) -> Row:
        """What the next guess is drawn by, as if those before it stood."""
        s, params = self.sequence, self.sequence.request.params
        tokens, counts = s.token_ids, s.output_counts
        if params.counts_tokens and self.guesses:
            tokens, counts = [*tokens, *self.guesses], counts + Counter(self.guesses)
        return Row(params, s.seed, self.begun + len(self.guesses), tokens, counts)

    def propose(self, token: int | None, weights: Tensor) -> None:
        """The next guess and what it was drawn from, [vocab]; None: there was nothing to draw from."""
        if token is None:
            self.most = len(self.guesses)
        else:
            self.guesses.append(token)
            self.proposals.append(weights)

    def suggest(self, token: int, chance: float, verified: float, made: float) -> None:
        """The next guess, if it is one, and worth being verified. chance: as the model sees it; in plain steps,
        verified: what that costs, made: and to have made one more, too."""
        is_sampled = self.sequence.request.params.temperature > 0  # then likely tokens are not all that comes
        self.reach *= 1.0 if is_sampled else chance
        worth = token >= 0 and self.reach >= verified
        if worth:
            self.guesses.append(token)
        if not worth or self.reach < made:
            self.most = len(self.guesses)

    def hand_over(self) -> None:
        """The sequence drafts what was guessed."""
        self.sequence.drafts = list(self.guesses)
        self.sequence.proposals = torch.stack(self.proposals) if self.proposals else None

    def free(self) -> None:
        if self.state:
            self.state.free()
            self.state = None
        self.guesses, self.proposals = [], []

"""A smaller model as drafter, with its own runner and pool and the same sequence states.

Tokens that the target has computed meanwhile are processed when drafts are needed, up to a token budget; then each
pass drafts one more token for every drafting sequence. Random drafts are sampled with the target's own parameters
and passed on with their distributions. The number of drafts may depend on distributions and earlier tokens, never
on the sampled draft itself: otherwise accepted tokens would not follow the target's distribution.
"""

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from localllm.request import SamplingParams
from localllm.runtime.batch import upload_values
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import SamplingSpec, sample, sample_drafts
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_budget import AcceptanceRate, DraftModelCost, choose_draft_count
from localllm.runtime.step import Step

GREEDY = SamplingSpec(SamplingParams(temperature=0), 0, 0, (), Counter())
UNKNOWN_TOKEN = 0  # replaces tokens of the target that the draft model's vocabulary lacks


@dataclass(eq=False)
class DraftSequence:
    """A sequence as a draft model computes it: the same tokens, a separate state, and draft tokens behind them.

    `draft_ids` follow the first `verified_len` tokens, until `sync` is called after verification.
    """

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
        position = self.verified_len + len(self.draft_ids)
        return SamplingSpec(params, s.seed, position, tokens, counts, forbidden_ids=s.forbidden_ids(position))

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


class DraftModel:
    """A `Drafter`. A sequence for which its pool has no blocks gets no drafts."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        target_vocab_size: int,
        max_len: int,
        token_budget: int,
        draft_cost: DraftModelCost,
    ):
        """target_vocab_size: of the target; max_len: maximum tokens per sequence here; token_budget: tokens per
        pass.
        """
        self.runner, self.pool, self.draft_cost = runner, pool, draft_cost
        self.target_vocab_size, self.max_len, self.token_budget = target_vocab_size, max_len, token_budget
        self.own_vocab_size = runner.model.config.vocab_size
        self.draft_sequences: dict[Sequence, DraftSequence] = {}
        self.extra_step_cost = 0.0  # cost of a step with one draft per sequence, beyond a plain one

    def may_draft(self, sequence: Sequence) -> bool:
        return self.max_drafts(sequence, self.draft_cost.costs(1)) > 0

    def max_drafts(self, sequence: Sequence, costs: ListLike[float]) -> int:
        """Return how many drafts pay for themselves and fit."""
        free_positions = min(sequence.max_drafts, self.max_len - len(sequence.token_ids))
        follower = self.draft_sequences.get(sequence)
        return min(
            choose_draft_count(follower.acceptance if follower else AcceptanceRate(), costs), free_positions
        )

    def draft(self, sequences: list[Sequence]) -> None:
        for follower in self.draft_sequences.values():
            if follower.sequence.state is None:  # preempted, so it will not draft soon
                follower.free()
        ready = [s for s in sequences if len(s.token_ids) - s.computed == 1]
        for sequence in ready:
            self.draft_sequences.setdefault(sequence, DraftSequence(sequence, self.pool))
        if not ready:
            return
        costs = self.draft_cost.costs(len(ready))
        self.extra_step_cost = costs[1] - 1
        counts = {self.draft_sequences[s]: count for s in ready if (count := self.max_drafts(s, costs)) > 0}
        try:
            for follower, count in counts.items():
                follower.sync(count)
            work = self.share_budget(counts)
            while work:
                self.run_pass(work)
                work = [(f, 1) for f, _ in work if f.pending == 1 and len(f.draft_ids) < f.max_drafts]
        except Exception:
            for follower in self.draft_sequences.values():
                follower.free()
            self.pool.reset_prefix_cache()  # the failed pass may not have written the blocks in the index
            raise
        for follower in counts:
            follower.publish_drafts()

    def share_budget(self, drafting: Iterable[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """Distribute the token budget of the first pass, starting with the sequences that lack the fewest
        tokens.
        """
        work, remaining = [], self.token_budget
        for follower in sorted(drafting, key=lambda f: f.pending):
            if remaining:
                work.append((follower, min(remaining, follower.pending)))
                remaining -= work[-1][1]
        return work

    def run_pass(self, work: list[tuple[DraftSequence, int]]) -> None:
        """Run one pass: compute the given tokens, and draft the next token of each sequence that is up to date."""
        start, passing, token_ids = time.perf_counter(), list[DraftSequence](), list[list[int]]()
        for follower, count in work:
            try:
                ids = follower.extend(count)
            except OutOfBlocks:
                follower.free()
                continue
            passing.append(follower)
            token_ids.append([token if token < self.own_vocab_size else UNKNOWN_TOKEN for token in ids])
        if not passing:
            return
        newest, index, end = list[DraftSequence](), list[int](), 0
        for follower, ids in zip(passing, token_ids, strict=True):
            end += len(ids)
            if follower.pending == 0:
                newest.append(follower)
                index.append(end - 1)
        step = Step(
            states=[f.state for f in passing if f.state],
            token_ids=token_ids,
            logit_index=index,
            sampling_specs=[GREEDY] * len(newest),
            token_slots=list(range(len(newest))),
            unread_tokens=[],
            keep_logits=True,
            copies=self.pool.drain_copies(),
        )
        logits = self.runner.run(step).logits
        if newest and logits is not None:
            # Pad or cut to the target's vocabulary; logits beyond either vocabulary stand for no token.
            self.choose_drafts(
                newest, functional.pad(logits, (0, self.target_vocab_size - self.own_vocab_size), value=-torch.inf)
            )
            if end == len(passing):
                self.draft_cost.record_pass(len(passing), time.perf_counter() - start)

    def choose_drafts(self, sequences: list[DraftSequence], logits: Tensor) -> None:
        """Add a draft to each sequence from logits [N, vocab], unless it is not worth verifying."""

        def select(indices: list[int]) -> tuple[list[DraftSequence], Tensor, list[SamplingSpec]]:
            selected = [sequences[i] for i in indices]
            return (
                selected,
                logits[upload_values(indices, torch.int64, logits.device)],
                [f.sampling_spec() for f in selected],
            )

        sampled = [i for i, f in enumerate(sequences) if f.is_sampled]
        if sampled:
            selected, scores, specs = select(sampled)
            tokens, weights = sample_drafts(scores, specs)
            for follower, token, proposal, total in zip(
                selected, tokens.tolist(), weights, weights.sum(-1).tolist(), strict=True
            ):
                follower.add_sampled(token if 0 < total < torch.inf else None, proposal)
        greedy = [i for i, f in enumerate(sequences) if not f.is_sampled]
        if greedy:
            selected, scores, specs = select(greedy)
            chances = scores.softmax(-1).amax(-1).tolist()
            pass_cost = self.draft_cost.pass_cost(len(sequences))
            for follower, token, chance in zip(selected, sample(scores, specs).tolist(), chances, strict=True):
                follower.add_greedy(token, chance, self.extra_step_cost - pass_cost, self.extra_step_cost)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if sequence in self.draft_sequences:
            self.draft_sequences[sequence].acceptance.record_verified(drafted, accepted)

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        self.draft_cost.record_step(sequences, drafts, seconds)

    def forget(self, sequence: Sequence) -> None:
        if follower := self.draft_sequences.pop(sequence, None):
            if follower.state:
                follower.sync(0)  # so that a later turn finds the verified tokens
            follower.free()

    def replace_caches(self, runner: Runner, pool: BlockPool, max_len: int) -> None:
        """Continue with other caches, after `free`."""
        self.runner, self.pool, self.max_len = runner, pool, max_len

    def free(self) -> None:
        """Free the model and its caches. It cannot draft afterwards, unless `replace_caches` is called."""
        self.draft_sequences.clear()
        self.runner.free()

"""A smaller model that guesses what comes next: its own runner and pool, the same verbs of state.

What the target has computed meanwhile is caught up when guesses are wanted, so many tokens at a time; then each
pass guesses one token more of every sequence that drafts. Random guesses are drawn by the target's own parameters,
and handed on with what they were drawn from. How many there are may depend on distributions and on tokens before,
never on the guess itself: else what stands would not have the target's distribution.
"""

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import torch
from torch import Tensor
from torch.nn import functional

from localllm.request import SamplingParams
from localllm.runtime.host_to_device import upload_values
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import SamplingSpec, sample, sample_drafts
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.acceptance_rate import AcceptanceRate, DraftModelCost, choose_draft_count
from localllm.runtime.speculation.follower import DraftSequence
from localllm.runtime.step import Step

GREEDY = SamplingSpec(SamplingParams(temperature=0), 0, 0, (), Counter())
UNKNOWN_TOKEN = 0  # stands for tokens of the target that the draft model has no row for


class DraftModel:
    """A `Drafter`. A sequence that its pool has no room for goes without guesses."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        target_vocab_size: int,
        max_len: int,
        token_budget: int,
        draft_cost: DraftModelCost,
    ):
        """target_vocab_size: of the target; max_len: most tokens of a sequence here; token_budget: of a pass."""
        self.runner, self.pool, self.draft_cost = runner, pool, draft_cost
        self.target_vocab_size, self.max_len, self.token_budget = target_vocab_size, max_len, token_budget
        self.own_vocab_size = runner.model.config.vocab_size
        self.draft_sequences: dict[Sequence, DraftSequence] = {}
        self.extra_step_cost = 0.0  # a step for which one token each is guessed and verified, than a plain one

    def may_draft(self, sequence: Sequence) -> bool:
        return self.max_drafts(sequence, self.draft_cost.costs(1)) > 0

    def max_drafts(self, sequence: Sequence, costs: ListLike[float]) -> int:
        """How many guesses are worth their time, and have a place."""
        places = min(sequence.max_drafts, self.max_len - len(sequence.token_ids))
        follower = self.draft_sequences.get(sequence)
        return min(choose_draft_count(follower.acceptance if follower else AcceptanceRate(), costs), places)

    def draft(self, sequences: list[Sequence]) -> None:
        for follower in self.draft_sequences.values():
            if follower.sequence.state is None:  # preempted: there is no hurry
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
            self.pool.reset_prefix_cache()  # the pass that broke off may not have written what could be found
            raise
        for follower in counts:
            follower.publish_drafts()

    def share_budget(self, drafting: Iterable[DraftSequence]) -> list[tuple[DraftSequence, int]]:
        """Who catches up by how many tokens in the first pass: first those that lack fewest."""
        work, room = [], self.token_budget
        for follower in sorted(drafting, key=lambda f: f.pending):
            if room:
                work.append((follower, min(room, follower.pending)))
                room -= work[-1][1]
        return work

    def run_pass(self, work: list[tuple[DraftSequence, int]]) -> None:
        """One pass: tokens are computed, and of those that lack none the next is guessed."""
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
            # A row more or less than the target's embedding has stands for no token.
            self.choose_drafts(
                newest, functional.pad(logits, (0, self.target_vocab_size - self.own_vocab_size), value=-torch.inf)
            )
            if end == len(passing):
                self.draft_cost.record_pass(len(passing), time.perf_counter() - start)

    def choose_drafts(self, sequences: list[DraftSequence], logits: Tensor) -> None:
        """Guess by these logits, [N, vocab], whatever of it is worth verifying."""

        def of(places: list[int]) -> tuple[list[DraftSequence], Tensor, list[SamplingSpec]]:
            some = [sequences[i] for i in places]
            return (
                some,
                logits[upload_values(places, torch.int64, logits.device)],
                [f.sampling_spec() for f in some],
            )

        drawn = [i for i, f in enumerate(sequences) if f.is_sampled]
        if drawn:
            some, scores, rows = of(drawn)
            tokens, weights = sample_drafts(scores, rows)
            for follower, token, proposal, total in zip(
                some, tokens.tolist(), weights, weights.sum(-1).tolist(), strict=True
            ):
                follower.add_sampled(token if 0 < total < torch.inf else None, proposal)
        others = [i for i, f in enumerate(sequences) if not f.is_sampled]
        if others:
            some, scores, rows = of(others)
            sure = scores.softmax(-1).amax(-1).tolist()
            price = self.draft_cost.pass_cost(len(sequences))
            for follower, token, chance in zip(some, sample(scores, rows).tolist(), sure, strict=True):
                follower.add_greedy(token, chance, self.extra_step_cost - price, self.extra_step_cost)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if sequence in self.draft_sequences:
            self.draft_sequences[sequence].acceptance.record_verified(drafted, accepted)

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        self.draft_cost.record_step(sequences, drafts, seconds)

    def forget(self, sequence: Sequence) -> None:
        if follower := self.draft_sequences.pop(sequence, None):
            if follower.state:
                follower.sync(0)  # a later turn finds what stands
            follower.free()

    def replace_caches(self, runner: Runner, pool: BlockPool, max_len: int) -> None:
        """Guess with other caches, after `free`."""
        self.runner, self.pool, self.max_len = runner, pool, max_len

    def free(self) -> None:
        """Let go of the model and of all that it keeps: nothing can be guessed after it, before `move`."""
        self.draft_sequences.clear()
        self.runner.free()

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
UNKNOWN_TOKEN = 0  # replaces tokens of the target that the draft model's vocabulary lacks


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
        """target_vocab_size: of the target; max_len: most tokens of a sequence here; token_budget: tokens per
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

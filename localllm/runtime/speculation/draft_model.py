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
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import Row, propose, sample
from localllm.runtime.sent import sent
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.follower import Follower
from localllm.runtime.speculation.pace import Chance, Pace, length
from localllm.runtime.state import BlockPool, OutOfBlocks
from localllm.runtime.step import Step

LIKELIEST = Row(SamplingParams(temperature=0), 0, 0, (), Counter())
UNKNOWN = 0  # stands for tokens of the target that the draft model has no row for


class DraftModel:
    """A `Drafter`. A sequence that its pool has no room for goes without guesses."""

    def __init__(
        self, runner: Runner, pool: BlockPool, vocabulary: int, context: int, token_budget: int, pace: Pace
    ):
        """vocabulary: of the target; context: most tokens of a sequence here; token_budget: of a pass."""
        self.runner, self.pool, self.pace = runner, pool, pace
        self.vocabulary, self.context, self.token_budget = vocabulary, context, token_budget
        self.known = runner.model.config.vocab_size
        self.followers: dict[Sequence, Follower] = {}
        self.dearer = 0.0  # a step for which one token each is guessed and verified, than a plain one

    def wants(self, sequence: Sequence) -> bool:
        return self.most(sequence, self.pace.costs(1)) > 0

    def most(self, sequence: Sequence, costs: ListLike[float]) -> int:
        """How many guesses are worth their time, and have a place."""
        places = min(sequence.room, self.context - len(sequence.token_ids))
        follower = self.followers.get(sequence)
        return min(length(follower.chance if follower else Chance(), costs), places)

    def draft(self, sequences: list[Sequence]) -> None:
        for follower in self.followers.values():
            if follower.sequence.state is None:  # preempted: there is no hurry
                follower.free()
        ready = [s for s in sequences if len(s.token_ids) - s.computed == 1]
        for sequence in ready:
            self.followers.setdefault(sequence, Follower(sequence, self.pool))
        if not ready:
            return
        costs = self.pace.costs(len(ready))
        self.dearer = costs[1] - 1
        counts = {self.followers[s]: count for s in ready if (count := self.most(s, costs)) > 0}
        try:
            for follower, count in counts.items():
                follower.catch_up(count)
            work = self.share(counts)
            while work:
                self.guess(work)
                work = [(f, 1) for f, _ in work if f.pending == 1 and len(f.guesses) < f.most]
        except Exception:
            for follower in self.followers.values():
                follower.free()
            self.pool.forget_all()  # the pass that broke off may not have written what could be found
            raise
        for follower in counts:
            follower.hand_over()

    def share(self, drafting: Iterable[Follower]) -> list[tuple[Follower, int]]:
        """Who catches up by how many tokens in the first pass: first those that lack fewest."""
        work, room = [], self.token_budget
        for follower in sorted(drafting, key=lambda f: f.pending):
            if room:
                work.append((follower, min(room, follower.pending)))
                room -= work[-1][1]
        return work

    def guess(self, work: list[tuple[Follower, int]]) -> None:
        """One pass: tokens are computed, and of those that lack none the next is guessed."""
        start, passing, token_ids = time.perf_counter(), list[Follower](), list[list[int]]()
        for follower, count in work:
            try:
                ids = follower.extend(count)
            except OutOfBlocks:
                follower.free()
                continue
            passing.append(follower)
            token_ids.append([token if token < self.known else UNKNOWN for token in ids])
        if not passing:
            return
        newest, index, end = list[Follower](), list[int](), 0
        for follower, ids in zip(passing, token_ids, strict=True):
            end += len(ids)
            if follower.pending == 0:
                newest.append(follower)
                index.append(end - 1)
        step = Step(
            states=[f.state for f in passing if f.state],
            token_ids=token_ids,
            logit_index=index,
            draws=[LIKELIEST] * len(newest),
            rows=list(range(len(newest))),
            unread=[],
            keeps_logits=True,
            copies=self.pool.drain_copies(),
        )
        logits = self.runner.run(step).logits
        if newest and logits is not None:
            # A row more or less than the target's embedding has stands for no token.
            self.choose(newest, functional.pad(logits, (0, self.vocabulary - self.known), value=-torch.inf))
            if end == len(passing):
                self.pace.passed(len(passing), time.perf_counter() - start)

    def choose(self, followers: list[Follower], logits: Tensor) -> None:
        """Guess by these logits, [N, vocab], whatever of it is worth verifying."""

        def of(places: list[int]) -> tuple[list[Follower], Tensor, list[Row]]:
            some = [followers[i] for i in places]
            return some, logits[sent(places, torch.int64, logits.device)], [f.row() for f in some]

        drawn = [i for i, f in enumerate(followers) if f.is_drawn]
        if drawn:
            some, scores, rows = of(drawn)
            tokens, weights = propose(scores, rows)
            for follower, token, proposal, total in zip(
                some, tokens.tolist(), weights, weights.sum(-1).tolist(), strict=True
            ):
                follower.propose(token if 0 < total < torch.inf else None, proposal)
        others = [i for i, f in enumerate(followers) if not f.is_drawn]
        if others:
            some, scores, rows = of(others)
            sure = scores.softmax(-1).amax(-1).tolist()
            price = self.pace.price(len(followers))
            for follower, token, chance in zip(some, sample(scores, rows).tolist(), sure, strict=True):
                follower.suggest(token, chance, self.dearer - price, self.dearer)

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if sequence in self.followers:
            self.followers[sequence].chance.verified(drafted, accepted)

    def stepped(self, sequences: int, drafts: int, seconds: float) -> None:
        self.pace.stepped(sequences, drafts, seconds)

    def forget(self, sequence: Sequence) -> None:
        if follower := self.followers.pop(sequence, None):
            if follower.state:
                follower.catch_up(0)  # a later turn finds what stands
            follower.free()

    def move(self, runner: Runner, pool: BlockPool, context: int) -> None:
        """Guess with other caches, after `free`."""
        self.runner, self.pool, self.context = runner, pool, context

    def free(self) -> None:
        """Let go of the model and of all that it keeps: nothing can be guessed after it, before `move`."""
        self.followers.clear()
        self.runner.free()

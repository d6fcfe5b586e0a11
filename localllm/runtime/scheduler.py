"""Who brings how many tokens to the next step. Pure Python over counts: knows no tensor and no model.

Running sequences go before waiting ones and short work before long, so that a long prompt never holds up an
answer that is already streaming; a share of the budget is the first sequence's own, so that it never starves.

First is who has more priority, among equals who came first. Nobody is put back so that another may begin: priority
decides who is admitted next, and who gives its blocks up where there are none left.

A sequence is admitted where there are blocks for what it knows and what it may still say, beside those that run.
What it may say is `max_tokens`, of which at most a quarter of all blocks counts, so that who asks for much more
than it needs keeps no others out. Without `max_tokens` nobody knows it: an even share of the blocks among the most
sequences that may run is counted. What comes on top is overcommitted: the last sequence gives its blocks back, and
is computed again.
"""

import bisect

from localllm.runtime.sequence import Sequence
from localllm.runtime.state import BlockPool, OutOfBlocks, SequenceState

FIRST_SHARE = 4  # one part in so many of the budget is kept for the first sequence
ANSWER_SHARE = 4  # one part in so many of all blocks is the most that is reserved for one answer
PASSED = 8  # so many may pass a sequence for which there is no room yet, and so many of the queue are looked at

Work = list[tuple[Sequence, int]]


class Scheduler:
    def __init__(self, pool: BlockPool, token_budget: int, max_running: int):
        self.pool = pool
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # in the order of `turn`
        self.running: list[Sequence] = []
        self.work: dict[Sequence, int] = {}  # of the step being scheduled
        self.room = 0  # tokens that it may still take
        self.preemptions = 0  # so far, as what follows
        self.lookups = self.hits = 0  # sequences that were admitted, and those that found a beginning
        self.prompt_tokens = self.cached_tokens = 0  # theirs, and those that were found

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=turn)

    def next_work(self, budget: int | None = None) -> Work:
        """The sequences of the next step, each with room made for the tokens it brings. budget: of all together,
        None for the usual."""
        self.work, self.room = {}, self.token_budget if budget is None else min(budget, self.token_budget)
        fair = -(-self.room // FIRST_SHARE)
        if self.running:
            self.bring(min(self.running, key=rank), fair)
        ordered = sorted(self.running, key=lambda s: (s.pending, s.request.id))
        for sequence in ordered:
            if sequence.pending <= fair:
                self.bring(sequence, fair)
        self.admit()
        for sequence in ordered:
            self.bring(sequence, self.token_budget)
        return list(self.work.items())

    def bring(self, sequence: Sequence, most: int) -> None:
        """Let a running sequence bring more tokens, as far as the budget and its pending ones go."""
        room = min(most, self.room)
        if sequence.pending > room:
            sequence.forget_drafts()
        if (count := min(sequence.pending, room)) > 0 and (count := self.reserve(sequence, count)):
            self.work[sequence] = self.work.get(sequence, 0) + count
            self.room -= count

    def admit(self) -> None:
        """Waiting sequences in their order, as long as they fit beside the running ones. One that does not yet may
        be passed by others, a few times, unless it was preempted: it may keep a row on the device."""
        if not self.waiting:
            return
        promised, at = sum(self.missing_blocks(s) for s in self.running), 0
        while at < min(PASSED, len(self.waiting)) and len(self.running) < self.max_running and self.room:
            sequence = self.waiting[at]
            if self.start(sequence, promised):
                del self.waiting[at]
                for passed in self.waiting[:at]:
                    passed.passed += 1
                self.running.append(sequence)
                self.bring(sequence, self.room)
                promised += self.missing_blocks(sequence)
            elif sequence.was_admitted or sequence.passed >= PASSED:
                break
            else:
                at += 1

    def start(self, sequence: Sequence, promised: int) -> bool:
        """Give it the blocks that hold its beginning already, if there are others for the rest beside the blocks
        that are promised. Alone it needs no more than what it knows takes."""
        sequence.state = SequenceState(self.pool, () if sequence.reads_whole_prompt else sequence.token_ids)
        answer = self.answer_budget(sequence) if self.running else 0
        no_blocks = self.missing_blocks(sequence, answer) + promised > self.pool.available
        if no_blocks or sequence.state.missing_rows > self.pool.rows.available:
            self.release(sequence)
            return False
        if not sequence.was_admitted:
            self.count(sequence)
        return True

    def count(self, sequence: Sequence) -> None:
        """It begins for the first time."""
        sequence.stopwatch.schedule()
        sequence.cached_tokens = sequence.computed
        self.lookups += 1
        self.hits += sequence.computed > 0
        self.prompt_tokens += sequence.prompt_length
        self.cached_tokens += sequence.computed

    @property
    def streaming(self) -> int:
        """Tokens of those who get their next one with each step, drafts among them."""
        return sum(s.pending for s in self.running if s.pending <= 1 + len(s.drafts))

    def hurried(self, most: int) -> bool:
        """Has anybody no more than so many tokens to compute until the next of its answer?"""
        return any(s.pending <= most for s in (*self.running, *self.waiting[:PASSED]))

    def answer_budget(self, sequence: Sequence) -> int:
        """How many tokens more are reserved for what it may still say, as far as its limit allows."""
        share = self.max_running if sequence.request.params.max_tokens is None else ANSWER_SHARE
        return self.pool.count * self.pool.block_size // share

    def missing_blocks(self, sequence: Sequence, answer: int | None = None) -> int:
        """How many blocks more it takes to compute all that the sequence knows, and so many tokens of what it may
        still say. None: as many as its budget."""
        assert sequence.state
        known = sequence.computed + sequence.pending
        budget = self.answer_budget(sequence) if answer is None else answer
        wanted = max(known, min(sequence.limit, known + budget))
        return -(-wanted // self.pool.block_size) - len(sequence.state.table)

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Room for `count` more tokens, or for those of them that are no drafts; where there is none, the last
        sequence gives its blocks up. For how many there is room now: 0 where it was itself the last."""
        while sequence.state:
            try:
                sequence.state.extend(count)
                return count
            except OutOfBlocks:
                if sequence.drafts:  # guesses are not worth what another has computed
                    sequence.forget_drafts()
                    count = sequence.pending
                else:
                    self.preempt(max(self.running, key=rank))
        return 0

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks; it waits before all that were never admitted, and is computed again."""
        self.release(sequence)
        self.room += self.work.pop(sequence, 0)
        self.running.remove(sequence)
        self.add(sequence)
        self.preemptions += 1

    def retire(self, sequence: Sequence) -> None:
        self.release(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    @staticmethod
    def release(sequence: Sequence) -> None:
        sequence.forget_drafts()
        if sequence.state:
            sequence.state.free()
            sequence.state = None


def rank(sequence: Sequence) -> tuple[int, int]:
    """More priority first, among equals who came first."""
    return -sequence.request.priority, sequence.request.id


def turn(sequence: Sequence) -> tuple[bool, int, int]:
    """The order of the queue: those that were preempted first, each by rank."""
    return not sequence.was_admitted, *rank(sequence)

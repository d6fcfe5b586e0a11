"""Who brings how many tokens to the next step. Pure Python over counts: knows no tensor and no model.

Running sequences go before waiting ones and short work before long, so that a long prompt never holds up an
answer that is already streaming; a share of the budget is the oldest sequence's own, so that it never starves.
"""

from collections import deque

from localllm.runtime.sequence import Sequence
from localllm.runtime.state import BlockPool, OutOfBlocks, SequenceState

OLDEST_SHARE = 4  # one part in so many of the budget is kept for the oldest sequence

Work = list[tuple[Sequence, int]]


class Scheduler:
    def __init__(self, pool: BlockPool, token_budget: int, max_running: int):
        self.pool = pool
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.work: dict[Sequence, int] = {}  # of the step being scheduled

    def next_work(self) -> Work:
        """The sequences of the next step, each with room made for the tokens it brings."""
        self.work = {}
        fair = -(-self.token_budget // OLDEST_SHARE)
        if self.running:
            self.bring(min(self.running, key=arrival), fair)
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
        room = min(most, self.token_budget - sum(self.work.values()))
        if sequence.pending > room:
            sequence.forget_drafts()
        if (count := min(sequence.pending, room)) > 0 and (count := self.reserve(sequence, count)):
            self.work[sequence] = self.work.get(sequence, 0) + count

    def admit(self) -> None:
        """Waiting sequences in their order, as long as all that they know fits beside what the running know."""
        promised = sum(self.missing_blocks(s) for s in self.running)
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if sum(self.work.values()) >= self.token_budget:
                break
            ids = () if sequence.reads_whole_prompt else sequence.token_ids
            sequence.state = SequenceState(self.pool, ids)
            no_blocks = self.missing_blocks(sequence) + promised > self.pool.available
            if no_blocks or sequence.state.missing_rows > self.pool.rows.available:
                self.release(sequence)
                break
            sequence.stopwatch.schedule()
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            self.running.append(self.waiting.popleft())
            self.bring(sequence, self.token_budget)
            promised += self.missing_blocks(sequence)

    def missing_blocks(self, sequence: Sequence) -> int:
        """How many blocks more it takes to compute all that the sequence knows."""
        assert sequence.state
        return -(-(sequence.computed + sequence.pending) // self.pool.block_size) - len(sequence.state.table)

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Room for `count` more tokens, or for those of them that are no drafts; where there is none, the youngest
        sequence gives its blocks up. For how many there is room now: 0 where it was itself the youngest."""
        while sequence.state:
            try:
                sequence.state.extend(count)
                return count
            except OutOfBlocks:
                if sequence.drafts:  # guesses are not worth what another has computed
                    sequence.forget_drafts()
                    count = sequence.pending
                else:
                    self.preempt(max(self.running, key=arrival))
        return 0

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks; it waits at the head of the queue and is computed again."""
        self.release(sequence)
        self.work.pop(sequence, None)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

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


def arrival(sequence: Sequence) -> int:
    return sequence.request.id

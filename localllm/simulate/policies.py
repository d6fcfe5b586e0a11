"""Schedulers and block pools to compare the product's with, for simulations only.

Static and dynamic batching compute a batch of requests until the longest answer has ended; the slots of shorter
answers stay empty, and each request occupies the blocks of its whole context from the start. A static batch starts
when it is full, a dynamic one also when its first request has waited long enough.
"""

import math
from collections.abc import Sequence as ListLike
from typing import Protocol

from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.sequence import Sequence


class CountingBlockPool(BlockPool):
    """A pool without a prefix cache, which only counts its blocks: without common prefixes, no decision depends on
    which block is where."""

    def __init__(self, blocks: int, block_size: int, state_slots: int = 0):
        super().__init__(0, block_size, state_slots)
        self.count = self.free = blocks

    @property
    def free_count(self) -> int:
        return self.free

    def allocate(self, after: int | None = None) -> int:
        if not self.free:
            raise OutOfBlocks
        self.free -= 1
        return 0

    def release(self, block: int) -> None:
        self.free += 1

    def make_writable(self, block: int) -> int:
        return block

    def find_longest_prefix(self, token_ids: ListLike[int], scope: str = "") -> tuple[list[int], list[int]]:
        return [], []


class SimulatedScheduler(Scheduler):
    """The product's scheduler with some of its policies exchanged."""

    admits_by_reservation = True
    shortest_first = False

    def reserved_answer_len(self, sequence: Sequence) -> int:
        return super().reserved_answer_len(sequence) if self.admits_by_reservation else 0

    def queue_key(self, sequence: Sequence) -> tuple[bool, int, int]:
        admitted, priority, number = super().queue_key(sequence)
        return (admitted, sequence.prompt_len, number) if self.shortest_first else (admitted, priority, number)

    def wake_at(self) -> float:
        """Return when to schedule again although nothing arrives, if nothing is running; infinity for never."""
        return math.inf


class Batcher(Protocol):
    """What a batching scheduler tells its engine."""

    padding_sequences: int


class BatchScheduler(SimulatedScheduler):
    """Static batching, or dynamic batching if `max_wait_s` is finite."""

    batch_size = 1
    max_wait_s = math.inf
    context = 0  # tokens that each request occupies
    closed = False  # no further request will arrive, so that a batch cannot become full
    batcher: Batcher | None = None
    batch_len = 0  # sequences of the batch that is running
    batch_left = 0  # that the batch may still admit

    def admit(self) -> None:
        """Begin a batch if none is running, and admit the rest of one that has begun: over several steps, if its
        prompts are longer than a step."""
        if not self.running and self.waiting:
            now = self.waiting[0].stopwatch.clock()
            ready = len(self.waiting) >= self.batch_size or self.closed or now >= self.wake_at()
            self.batch_left, self.batch_len = self.batch_size if ready else 0, 0
        if not self.batch_left:
            return
        limit, running = self.max_running, len(self.running)
        self.max_running = min(limit, running + self.batch_left)
        super().admit()
        self.max_running = limit
        admitted = len(self.running) - running
        self.batch_len += admitted
        # With budget left, nothing else was waiting or fitted.
        self.batch_left = 0 if self.remaining_budget else self.batch_left - admitted

    def wake_at(self) -> float:
        return min((s.request.arrival for s in self.waiting), default=math.inf) + self.max_wait_s

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        assert self.batcher
        self.batcher.padding_sequences = self.batch_len - len(self.running) if self.running else 0

    def missing_blocks(self, sequence: Sequence, answer_len: int | None = None) -> int:
        """Return the blocks that a sequence lacks for its whole context, which it occupies from the start."""
        assert sequence.state
        return -(-self.context // self.pool.block_size) - len(sequence.state.block_table)

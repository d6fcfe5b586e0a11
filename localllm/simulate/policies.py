"""Schedulers and block pools to compare the product's with, for simulations only.

Static and dynamic batching compute a batch of requests until the longest answer has ended; the slots of shorter
answers stay empty, and each request occupies the blocks of its whole context from the start. A static batch starts
when it is full, a dynamic one also when its first request has waited long enough.
"""

import math
from collections.abc import Sequence as ListLike
from typing import Protocol

from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks
from localllm.runtime.scheduler import FIRST_BUDGET_SHARE, ChunkPolicy, Scheduler
from localllm.runtime.sequence import Sequence
from localllm.simulate.sequence import DecodeGroup, SimulatedSequence


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

    def append_blocks(self, block_table: list[int], count: int) -> None:
        taken = min(count, self.free)
        self.free -= taken
        block_table += [0] * taken
        if taken < count:
            raise OutOfBlocks

    def release(self, block: int) -> None:
        self.free += 1

    def release_blocks(self, blocks: ListLike[int]) -> None:
        self.free += len(blocks)

    def make_writable(self, block: int) -> int:
        return block

    def find_longest_prefix(self, token_ids: ListLike[int], scope: str = "") -> tuple[list[int], list[int]]:
        return [], []


class SimulatedScheduler(Scheduler):
    """The product's scheduler with some of its policies exchanged, whose decoding sequences may be in a group.

    The group brings one token of each member before all other sequences, as the product schedules them as long as
    budget and blocks suffice.
    """

    admits_by_reservation = True
    shortest_first = False

    def __init__(self, pool: BlockPool, token_budget: int, max_running: int, chunk_policy: ChunkPolicy | None):
        super().__init__(pool, token_budget, max_running, chunk_policy)
        self.group = DecodeGroup(pool)

    @property
    def running_count(self) -> int:
        return len(self.running) + len(self.group.members)

    @property
    def streaming_tokens(self) -> int:
        return len(self.group.members) + super().streaming_tokens

    @property
    def scheduled_tokens(self) -> int:
        return len(self.group.members) + super().scheduled_tokens

    def has_short_work(self, max_pending: int) -> bool:
        return bool(self.group.members) or super().has_short_work(max_pending)

    def fill_step(self) -> None:
        if not self.group.members:
            return super().fill_step()
        first_share = -(-self.remaining_budget // FIRST_BUDGET_SHARE)
        self.remaining_budget -= len(self.group.members)
        self.group.extend()
        self.share_budget(first_share)

    @property
    def reserved_blocks(self) -> int:
        group = self.group
        reserved = super().reserved_blocks + group.missing_blocks
        for sequence in group.growing.values():
            length = group.length_of(sequence)
            blocks = self.blocks_of(sequence, length, self.reserved_answer_len(sequence))
            reserved += blocks - len(group.table_of(sequence))
        return reserved

    def can_use_group(self) -> bool:
        """Return whether the product would schedule the group first and preempt nothing."""
        group = self.group
        if len(group.members) > self.token_budget:
            return False
        needed = group.blocks_of_next_step
        for sequence in self.running:
            if sequence.pending < 2 or sequence.request.id < group.first_number:
                return False
            needed += self.missing_blocks(sequence, 0)
        return needed <= self.pool.free_count

    def join_group(self, sequences: ListLike[SimulatedSequence]) -> None:
        """Move sequences that decode from now on to the group."""
        for sequence in sequences:
            answer_len, length = self.reserved_answer_len(sequence), sequence.computed
            blocks = self.blocks_of(sequence, length, answer_len)
            grows = blocks != self.blocks_of(sequence, sequence.max_len, answer_len)
            self.group.join(sequence, None if grows else blocks)
        if len(sequences) == len(self.running):
            self.running.clear()
        else:
            joined = set(sequences)
            self.running = [s for s in self.running if s not in joined]

    def finish(self, sequence: Sequence) -> None:
        """Finish a sequence that is running, or that was preempted while its last token was computed."""
        queue = self.running if sequence.state else self.waiting  # where hundreds of thousands may wait behind it
        self.free_state(sequence)
        if sequence in queue:  # and not in the group
            queue.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        assert not self.group.members
        super().preempt(sequence)

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
        if not self.running_count and self.waiting:
            now = self.waiting[0].stopwatch.clock()
            ready = len(self.waiting) >= self.batch_size or self.closed or now >= self.wake_at()
            self.batch_left, self.batch_len = min(self.batch_size, self.max_running) if ready else 0, 0
        if not self.batch_left:
            return
        limit, running = self.max_running, self.running_count
        self.max_running = min(limit, running + self.batch_left)
        super().admit()
        self.max_running = limit
        admitted = self.running_count - running
        self.batch_len += admitted
        # With budget left, nothing else fitted.
        self.batch_left = self.batch_left - admitted if self.waiting and not self.remaining_budget else 0

    def wake_at(self) -> float:
        return min((s.request.arrival for s in self.waiting), default=math.inf) + self.max_wait_s

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        assert self.batcher
        running = self.running_count
        self.batcher.padding_sequences = self.batch_len - running if running else 0

    def blocks_of(self, sequence: Sequence, known_len: int, answer_len: int) -> int:
        """Return the blocks of a whole context, which a sequence occupies from the start."""
        return -(-self.context // self.pool.block_size)

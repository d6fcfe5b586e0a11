"""The state of a sequence: keys and values in reference-counted blocks of a shared pool, found again by their
content (prefix caching); and for recurrent layers one row, which holds what the tokens so far have left.

Pure Python over the numbers of blocks and rows: knows nothing of tensors, so that thousands of traces a second can
be tested.

Blocks can be cut anywhere, a row cannot: it holds the state at one length. So rows are saved on the way, and a
sequence that is rolled back lands at a length that has one; what lies between is pending again.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.kv_cache.blocks import ZERO_SOURCE, BlockAllocator, OutOfBlocks
from localllm.runtime.kv_cache.tiers import CopyRun, TieredBlockAllocator, merge_copies

__all__ = ["NO_COPIES", "BlockPool", "CacheCopies", "OutOfBlocks", "SequenceState", "Snapshot"]


class CacheCopies(NamedTuple):
    """What is to be done in this order before the next step; rows: (from, to)."""

    blocks: tuple[CopyRun, ...] = ()
    states: tuple[tuple[int, int], ...] = ()


NO_COPIES = CacheCopies()


class BlockPool(TieredBlockAllocator[tuple[int, ...]]):
    """The blocks of the prefix cache, and the state rows of recurrent layers. Evicted blocks move to the host tier
    where there is one, so that a paused conversation leaves the device and is not computed again; rows do not.

    The key of a full block is its parent's serial and its tokens: exact, so no hash collision can show one user
    another's text. Serials are never reused; the key of a saved row is the serial of the block that ends there.
    """

    def __init__(self, blocks: int, block_size: int, state_slots: int = 0, host_blocks: int = 0):
        super().__init__(blocks, host_blocks)
        self.block_size = block_size
        self.state_slots = BlockAllocator[int](state_slots)
        self.recurrent = state_slots > 0
        self.last_serial = 0
        self.evicted_count = 0  # blocks whose content gave way to others', so far
        self.serial_of: dict[tuple[int, ...], int] = {}  # of remembered blocks, by their keys

    def allocate(self, after: int | None = None) -> int:
        """The block behind `after` if it holds nothing, else the least recently used.

        Neighbours let attention read a sequence as one slice instead of gathering its blocks.
        """
        if after is not None and after + 1 in self.free_queue and after + 1 not in self.key_of:
            return self.allocate_block(after + 1)
        return super().allocate()

    def cache_block(self, block: int, parent_serial: int, tokens: ListLike[int]) -> int:
        """Let others find a full block; returns the serial that its successor names as parent."""
        key = (parent_serial, *tokens)
        if key not in self.cached:
            self.last_serial += 1
            self.serial_of[key] = self.last_serial
        self.add_to_index(block, key)
        return self.serial_of[key]

    def evict(self, block: int) -> None:
        self.evicted_count += block in self.key_of
        super().evict(block)

    def remove_from_index(self, block: int) -> None:
        key = self.key_of.get(block)
        super().remove_from_index(block)
        if key is not None and (serial := self.serial_of.pop(key)) in self.state_slots.cached:
            self.state_slots.remove_from_index(self.state_slots.cached[serial])

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.state_slots.reset_prefix_cache()

    def find_longest_prefix(self, token_ids: ListLike[int]) -> tuple[list[int], list[int]]:
        """Blocks that already hold the beginning of these tokens, and their serials, as far as `bring` has room;
        with recurrent layers only as far as there is a saved row.

        The last token is never taken from the cache: it must be run to give logits.
        """
        blocks, serials, parent, end, room = [], [], 0, 0, self.free_count
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            key = (parent, *token_ids[start : start + self.block_size])
            block = self.cached.get(key)
            if block is None:
                break
            room -= not self.ref_counts[block]
            if room < 0:
                break
            blocks.append(block)
            serials.append(parent := self.serial_of[key])
            if not self.recurrent or parent in self.state_slots.cached:
                end = len(blocks)
        return blocks[:end], serials[:end]

    def drain_copies(self) -> CacheCopies:
        """What to do now; nothing is left to do after that."""
        return CacheCopies(merge_copies(self.take_copies()), self.state_slots.take_copies())

    def check_invariants(self) -> None:
        super().check_invariants()
        self.state_slots.check_invariants()
        assert self.serial_of.keys() == self.cached.keys()
        assert set(self.state_slots.cached) <= set(self.serial_of.values())

    def check_all_free(self) -> None:
        """Nothing is in use any more."""
        self.check_invariants()
        assert self.free_count == self.count
        assert self.state_slots.free_count == self.state_slots.count


class StateSave(NamedTuple):
    """A row that holds the recurrent state at `length`, once the step that computes that far has run."""

    length: int
    slot: int
    replaces_last: bool  # replaces the sequence's last rolling one


class SequenceState:
    """One sequence's blocks and row, with the verbs that prefix sharing, speculation, undo and branching are made
    of: extend, rollback, snapshot, fork, free.

    What somebody else uses or may find is never written to: extending into it copies it first.
    """

    def __init__(self, pool: BlockPool, token_ids: ListLike[int] = ()):
        """Starts with the longest prefix of `token_ids` that the pool remembers."""
        self.pool = pool
        shared, self.block_serials = pool.find_longest_prefix(token_ids)
        self.block_table = pool.share_on_device(shared)
        self.length = len(self.block_table) * pool.block_size
        self.state_slot: int | None = (
            None  # with the recurrent state at `length`; None: there is none, or it is zero
        )
        self.state_saves: list[StateSave] = []  # not remembered yet
        self.last_rolling_serial = 0  # serial of the last rolling save that was remembered
        if pool.recurrent and self.block_serials:
            self.state_slot = pool.state_slots.share(pool.state_slots.cached[self.block_serials[-1]])

    @property
    def missing_state_slots(self) -> int:
        """How many rows it takes to extend."""
        rows = self.pool.state_slots
        return int(self.pool.recurrent and (self.state_slot is None or rows.ref_counts[self.state_slot] > 1))

    def extend(self, count: int) -> None:
        """Make room for `count` more tokens. Raises OutOfBlocks, having changed nothing that others see."""
        size, pool = self.pool.block_size, self.pool
        if count and self.length % size:
            # Before writing behind `length`: a block that is shared or remembered is copied, not written to.
            index = self.length // size
            self.block_table[index] = pool.make_writable(self.block_table[index])
        while len(self.block_table) * size < self.length + count:
            self.block_table.append(pool.allocate(self.block_table[-1] if self.block_table else None))
        if count and pool.recurrent:
            self.own_state_slot()
        self.length += count

    def own_state_slot(self) -> None:
        rows = self.pool.state_slots
        if self.state_slot is not None:
            self.state_slot = rows.make_writable(self.state_slot)
        else:
            self.state_slot = rows.allocate()
            rows.pending_copies.append((ZERO_SOURCE, self.state_slot))

    def plan_save(self, length: int, replaces_last: bool = False) -> None:
        """Have the recurrent state at `length` saved by the step that is about to run, for rollback and for others
        with this beginning. Where every row is in use it is not saved."""
        if self.pool.state_slots.free_count:
            self.state_saves.append(StateSave(length, self.pool.state_slots.allocate(), replaces_last))

    def plan_saves(self, count: int, prompt_len: int, draft_positions: Iterable[int]) -> None:
        """Have the recurrent state saved at the last block boundary among the last `count` tokens, and at each of
        `draft_positions`, the lengths behind which tokens may turn out to be wrong. Of an answer only the newest
        boundary
        is kept: what comes next continues it, or begins anew at the prompt."""
        if not self.pool.recurrent:
            return
        boundary = self.length - self.length % self.pool.block_size
        if boundary > self.length - count:
            self.plan_save(boundary, replaces_last=boundary > prompt_len)
        for length in draft_positions:
            if length != boundary:
                self.plan_save(length)

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; with recurrent layers those from the last saved length before it."""
        assert 0 <= length <= self.length
        if self.pool.recurrent and (length < self.length or not length):
            length = self.restore_state(length)
        size = self.pool.block_size
        keep = -(-length // size)
        # In order, so that they are reused as neighbours; an evicted text loses its beginning first.
        for block in self.block_table[keep:]:
            self.pool.release(block)
        del self.block_table[keep:]
        del self.block_serials[length // size :]
        self.length = length

    def restore_state(self, length: int) -> int:
        """Use the newest saved row up to `length`; returns its length, or 0 without a row."""
        pool, size = self.pool, self.pool.block_size
        saved = [(save.length, save.slot) for save in self.state_saves]
        saved += [
            ((i + 1) * size, pool.state_slots.cached[s])
            for i, s in enumerate(self.block_serials)
            if s in pool.state_slots.cached
        ]
        length, row = max((s for s in saved if s[0] <= length), default=(0, None))
        old, self.state_slot = self.state_slot, None if row is None else pool.state_slots.share(row)
        if old is not None:
            pool.state_slots.release(old)
        for save in self.state_saves:
            if save.length > length:
                pool.state_slots.release(save.slot)
        self.state_saves = [save for save in self.state_saves if save.length <= length]
        return length

    def cache_full_blocks(self, token_ids: ListLike[int]) -> None:
        """Let others find this sequence's full blocks. `token_ids`: all its tokens, from the first."""
        size, known = self.pool.block_size, min(self.length, len(token_ids))
        for index in range(len(self.block_serials), known // size):
            parent = self.block_serials[-1] if self.block_serials else 0
            tokens = token_ids[index * size : (index + 1) * size]
            self.block_serials.append(self.pool.cache_block(self.block_table[index], parent, tokens))
        for save in self.state_saves:
            if save.length <= known:
                self.cache_saved_state(save)
        self.state_saves = [save for save in self.state_saves if save.length > known]

    @property
    def end_of_step_copies(self) -> list[tuple[int, int]]:
        """The rows to copy once all tokens are computed: from the state's own to each that is to hold the same."""
        return [
            (self.state_slot, save.slot)
            for save in self.state_saves
            if self.state_slot is not None and save.length == self.length
        ]

    def cache_saved_state(self, save: StateSave) -> None:
        """A saved row now belongs to the prefix index, where it may be evicted. One inside a block is let go."""
        rows, size = self.pool.state_slots, self.pool.block_size
        if save.length % size == 0:
            serial = self.block_serials[save.length // size - 1]
            if save.replaces_last:
                if self.last_rolling_serial in rows.cached and self.last_rolling_serial != serial:
                    rows.remove_from_index(rows.cached[self.last_rolling_serial])
                self.last_rolling_serial = serial
            rows.add_to_index(save.slot, serial)
        rows.release(save.slot)

    def fork(self) -> "SequenceState":
        """A second sequence that shares all tokens so far."""
        twin = SequenceState(self.pool)
        used = -(-self.length // self.pool.block_size)  # not what a failed extend has left behind
        twin.block_table = [self.pool.share(block) for block in self.block_table[:used]]
        twin.block_serials = list(self.block_serials)
        twin.length = self.length
        twin.state_slot = None if self.state_slot is None else self.pool.state_slots.share(self.state_slot)
        for save in self.state_saves:
            self.pool.state_slots.share(save.slot)
        twin.state_saves = list(self.state_saves)
        return twin

    def snapshot(self) -> "Snapshot":
        """Something to come back to, whatever becomes of this sequence."""
        return Snapshot(self.fork())

    def free(self) -> None:
        self.rollback(0)


class Snapshot:
    """A sequence as it was: `fork()` continues from there, any number of times; `free()` lets it go."""

    def __init__(self, frozen: SequenceState):
        self.frozen = frozen
        self.length = frozen.length

    def fork(self) -> SequenceState:
        return self.frozen.fork()

    def free(self) -> None:
        self.frozen.free()

"""The state of a sequence: blocks of keys and values in a shared pool, with prefix caching, and a recurrent state.

Pure Python over block and state slot numbers, without tensors, so that thousands of traces a second can be tested.

Keys and values can be cut at any length, but a recurrent state, which occupies one state slot, exists at one
length only. So states are saved on the way, and a rollback lands at the nearest saved length before; the tokens in
between are pending again.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.kv_cache.blocks import ZERO_SOURCE, BlockAllocator, OutOfBlocks
from localllm.runtime.kv_cache.lower_tier import NOTHING_TO_LOAD, CachedPrefix, LowerTier, PrefixLoad
from localllm.runtime.kv_cache.prefix_journal import PrefixJournal
from localllm.runtime.kv_cache.tiers import CopyRun, TieredBlockAllocator, merge_copies

__all__ = ["NO_COPIES", "BlockPool", "CacheCopies", "OutOfBlocks", "SequenceState", "Snapshot"]


class CacheCopies(NamedTuple):
    """Copies to execute in order before the next step. states: (from slot, to slot)"""

    blocks: tuple[CopyRun, ...] = ()
    states: tuple[tuple[int, int], ...] = ()


NO_COPIES = CacheCopies()


class BlockPool(TieredBlockAllocator[tuple[int, ...]]):
    """The blocks of the prefix cache, and the state slots of recurrent layers.

    If there is a host tier, evicted blocks move to it, so that a paused conversation frees device memory and is
    not recomputed; recurrent states do not.

    The key of a full block is its parent's serial and its tokens: exact, so that no hash collision can expose one
    user's text to another. Serials are never reused; the key of a saved state is the serial of the block that ends
    there.
    """

    def __init__(self, blocks: int, block_size: int, state_slots: int = 0, host_blocks: int = 0):
        super().__init__(blocks, host_blocks)
        self.block_size = block_size
        self.state_slots = BlockAllocator[int](state_slots)
        self.recurrent = state_slots > 0
        self.last_serial = 0
        self.evicted_count = 0  # evictions so far
        self.serial_of: dict[tuple[int, ...], int] = {}  # of cached blocks, by their keys
        self.roots = {"": 0}  # serial of the empty prefix, by scope
        self.lower: LowerTier | None = None
        self.journal: PrefixJournal | None = None
        # For the lower tier, by serial: cached prefixes, and the serials of the blocks that follow.
        self.prefixes: dict[int, CachedPrefix] = {}
        self.successors: dict[int, dict[int, None]] = {}

    def allocate(self, after: int | None = None) -> int:
        """Allocate the block behind `after` if it is free and not cached, otherwise the least recently used block.

        Adjacent blocks let attention read a sequence as one slice instead of gathering its blocks.
        """
        if after is not None and after + 1 in self.free_queue and after + 1 not in self.key_of:
            return self.allocate_block(after + 1)
        return super().allocate()

    def append_blocks(self, block_table: list[int], count: int) -> None:
        """Allocate blocks at the end of a block table; raises OutOfBlocks behind the last free one."""
        for _ in range(count):
            block_table.append(self.allocate(block_table[-1] if block_table else None))

    def release_blocks(self, blocks: ListLike[int]) -> None:
        for block in blocks:
            self.release(block)

    def root_of(self, scope: str) -> int:
        """Return the serial of the empty prefix in a scope. Sequences of different scopes share no blocks."""
        return self.roots.setdefault(scope, -len(self.roots))

    def cache_block(
        self, block: int, parent_serial: int, token_ids: ListLike[int], length: int, scope: str = ""
    ) -> int:
        """Add a full block, which ends `token_ids[:length]`, to the prefix index. Returns the serial that its
        successor uses as parent."""
        key = (parent_serial, *token_ids[length - self.block_size : length])
        if key not in self.cached:
            self.last_serial += 1
            self.serial_of[key] = self.last_serial
            if self.lower:
                self.prefixes[self.last_serial] = CachedPrefix(key, token_ids, length, scope)
                self.successors.setdefault(parent_serial, {})[self.last_serial] = None
        self.add_to_index(block, key)
        return self.serial_of[key]

    def evict(self, block: int) -> None:
        self.evicted_count += block in self.key_of
        super().evict(block)

    def drop(self, block: int) -> None:
        if self.lower and (key := self.key_of.get(block)) is not None:
            self.lower.before_drop(self.serial_of[key])
        super().drop(block)

    def remove_from_index(self, block: int) -> None:
        key = self.key_of.get(block)
        super().remove_from_index(block)
        if key is None:
            return
        serial = self.serial_of.pop(key)
        if self.journal and not (self.lower and self.lower.writes_evicted):
            self.journal.dropped(serial)
        if serial in self.state_slots.cached:
            self.state_slots.remove_from_index(self.state_slots.cached[serial])
        if self.prefixes.pop(serial, None):
            followers = self.successors[key[0]]
            del followers[serial]
            if not followers:
                del self.successors[key[0]]

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        """Begin to load a prefix of these tokens from the lower tier, if there is one. It is part of the prefix
        cache when the load is done."""
        return self.lower.begin_load(token_ids, scope) if self.lower else NOTHING_TO_LOAD

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.state_slots.reset_prefix_cache()

    def find_longest_prefix(self, token_ids: ListLike[int], scope: str = "") -> tuple[list[int], list[int]]:
        """Return the cached blocks that hold a prefix of these tokens, and their serials.

        The prefix is limited by the blocks that can be shared (`share_on_device`), and with recurrent layers by
        the last saved state. The last token is never taken from the cache: it must be computed to give logits.
        """
        blocks, serials, parent, end, free_blocks = [], [], self.root_of(scope), 0, self.free_count
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            key = (parent, *token_ids[start : start + self.block_size])
            block = self.cached.get(key)
            if block is None:
                break
            free_blocks -= not self.ref_counts[block]
            if free_blocks < 0:
                break
            blocks.append(block)
            serials.append(parent := self.serial_of[key])
            if not self.recurrent or parent in self.state_slots.cached:
                end = len(blocks)
        return blocks[:end], serials[:end]

    def cached_blocks(self, token_ids: ListLike[int], scope: str) -> tuple[list[int], list[int]]:
        """Return the serials and ids of all cached blocks that hold a prefix of these tokens, also those in the
        host tier, and even where a recurrent state is missing."""
        serials, blocks, parent = list[int](), list[int](), self.root_of(scope)
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            key = (parent, *token_ids[start : start + self.block_size])
            if key not in self.cached:
                break
            serials.append(parent := self.serial_of[key])
            blocks.append(self.cached[key])
        return serials, blocks

    def mark_prefix_used(self, blocks: ListLike[int], serials: ListLike[int]) -> None:
        """Mark a prefix that `find_longest_prefix` returned as used now, with its recurrent state."""
        self.mark_used(blocks)
        if self.recurrent and serials:
            self.state_slots.mark_used([self.state_slots.cached[serials[-1]]])

    def reusable_count(self, serials: ListLike[int]) -> int:
        """Return how many of the cached blocks of a prefix a sequence can begin with: with recurrent layers, those
        up to the last saved state."""
        if not self.recurrent:
            return len(serials)
        saved = self.state_slots.cached
        return max((i + 1 for i, serial in enumerate(serials) if serial in saved), default=0)

    def forget(self, token_ids: ListLike[int], scope: str) -> None:
        """Remove these tokens from the prefix cache, from the end to a block that is in use or that others
        follow."""
        serials, blocks = self.cached_blocks(token_ids, scope)
        followers = Counter(key[0] for key in self.cached)
        for serial, block in zip(reversed(serials), reversed(blocks), strict=True):
            if followers[serial] or self.ref_counts[block]:
                break
            followers[self.key_of[block][0]] -= 1
            self.remove_from_index(block)

    def drain_copies(self) -> CacheCopies:
        """Return the pending copies of blocks and states, and clear them."""
        return CacheCopies(merge_copies(self.take_copies()), self.state_slots.take_copies())

    def check_invariants(self) -> None:
        super().check_invariants()
        self.state_slots.check_invariants()
        assert self.serial_of.keys() == self.cached.keys()
        assert set(self.state_slots.cached) <= set(self.serial_of.values())
        assert self.prefixes.keys() <= set(self.serial_of.values())
        assert sorted(s for each in self.successors.values() for s in each) == sorted(self.prefixes)

    def check_all_free(self) -> None:
        """Assert that nothing is in use."""
        self.check_invariants()
        assert self.free_count == self.count
        assert self.state_slots.free_count == self.state_slots.count


class StateSave(NamedTuple):
    """A state slot that holds the recurrent state at `length`, once the step that reaches it has run."""

    length: int
    slot: int
    replaces_last: bool  # replaces the sequence's last rolling save


class SequenceState:
    """The blocks and the state slot of a sequence.

    Its methods extend, rollback, snapshot, fork and free are what prefix sharing, speculative decoding and
    branching are built from. A block that is shared or in the prefix index is never written to: `extend` copies it
    first.
    """

    def __init__(self, pool: BlockPool, token_ids: ListLike[int] = (), scope: str = ""):
        """Start with the longest prefix of `token_ids` in the prefix cache. scope: see `BlockPool.root_of`"""
        self.pool = pool
        self.scope = scope
        self.block_table: list[int] = []
        self.block_serials: list[int] = []
        self.restored_blocks = self.length = 0
        # Holds the recurrent state at `length`; None: there is none, or it is zero.
        self.state_slot: int | None = None
        self.state_saves: list[StateSave] = []  # not in the prefix index yet
        self.last_rolling_serial = 0  # serial of the last rolling save in the prefix index
        if token_ids:
            self.share_prefix(*pool.find_longest_prefix(token_ids, scope))

    def share_prefix(self, blocks: ListLike[int], serials: ListLike[int]) -> None:
        """Start with a prefix that `BlockPool.find_longest_prefix` has just returned."""
        pool = self.pool
        self.block_table, self.block_serials = pool.share_on_device(blocks), list(serials)
        self.restored_blocks = sum(block >= pool.count for block in blocks)
        self.length = len(self.block_table) * pool.block_size
        if pool.recurrent and self.block_serials:
            self.state_slot = pool.state_slots.share(pool.state_slots.cached[self.block_serials[-1]])

    def extend(self, count: int) -> None:
        """Allocate slots for `count` more tokens.

        Raises OutOfBlocks, leaving everything that others see unchanged.
        """
        size, pool = self.pool.block_size, self.pool
        if count and self.length % size:
            # Writing begins behind `length`: a block that is shared or in the index is copied first.
            index = self.length // size
            self.block_table[index] = pool.make_writable(self.block_table[index])
        if (missing := -(-(self.length + count) // size) - len(self.block_table)) > 0:
            pool.append_blocks(self.block_table, missing)
        if count and pool.recurrent:
            self.own_state_slot()
        self.length += count

    def own_state_slot(self) -> None:
        """Ensure that the recurrent state is in a slot of its own, zeroed at the start of a sequence."""
        slots = self.pool.state_slots
        if self.state_slot is not None:
            self.state_slot = slots.make_writable(self.state_slot)
        else:
            self.state_slot = slots.allocate()
            slots.pending_copies.append((ZERO_SOURCE, self.state_slot))

    def plan_save(self, length: int, replaces_last: bool = False) -> None:
        """Have the next step save the recurrent state at `length`, for rollback and for sequences with this
        prefix.

        Nothing is saved while every state slot is in use.
        """
        if self.pool.state_slots.free_count:
            self.state_saves.append(StateSave(length, self.pool.state_slots.allocate(), replaces_last))

    def plan_saves(self, count: int, prompt_len: int, draft_positions: Iterable[int]) -> None:
        """Plan saves at the last block boundary among the last `count` tokens, and at each draft position.

        draft_positions: lengths after which tokens may turn out to be wrong. Within the answer, only the newest
        boundary is kept, because a later turn continues it or starts over after the prompt.
        """
        if not self.pool.recurrent:
            return
        boundary = self.length - self.length % self.pool.block_size
        if boundary > self.length - count:
            self.plan_save(boundary, replaces_last=boundary > prompt_len)
        for length in draft_positions:
            if length != boundary:
                self.plan_save(length)

    def rollback(self, length: int) -> None:
        """Drop the tokens from `length` on; with recurrent layers, those from the last saved length before it."""
        assert 0 <= length <= self.length
        if self.pool.recurrent and (length < self.length or not length):
            length = self.restore_state(length)
        size = self.pool.block_size
        keep = -(-length // size)
        # In order, so that they are reused as neighbours; a sequence loses its oldest cached blocks first.
        self.pool.release_blocks(self.block_table[keep:])
        del self.block_table[keep:]
        del self.block_serials[length // size :]
        self.length = length

    def restore_state(self, length: int) -> int:
        """Restore the newest saved state up to `length`; returns its length, or 0 if there is none."""
        pool, size = self.pool, self.pool.block_size
        saved = [(save.length, save.slot) for save in self.state_saves]
        saved += [
            ((i + 1) * size, pool.state_slots.cached[s])
            for i, s in enumerate(self.block_serials)
            if s in pool.state_slots.cached
        ]
        length, slot = max((s for s in saved if s[0] <= length), default=(0, None))
        previous, self.state_slot = self.state_slot, None if slot is None else pool.state_slots.share(slot)
        if previous is not None:
            pool.state_slots.release(previous)
        for save in self.state_saves:
            if save.length > length:
                pool.state_slots.release(save.slot)
        self.state_saves = [save for save in self.state_saves if save.length <= length]
        return length

    def cache_full_blocks(self, token_ids: ListLike[int]) -> None:
        """Add this sequence's full blocks to the prefix index. token_ids: all its tokens."""
        known_len = min(self.length, len(token_ids))
        self.cache_blocks(token_ids, known_len // self.pool.block_size)
        for save in self.state_saves:
            if save.length <= known_len:
                self.cache_saved_state(save)
        self.state_saves = [save for save in self.state_saves if save.length > known_len]

    def cache_blocks(self, token_ids: ListLike[int], count: int) -> None:
        """Add the first `count` blocks, which are full, to the prefix index."""
        for index in range(len(self.block_serials), count):
            parent = self.block_serials[-1] if self.block_serials else self.pool.root_of(self.scope)
            length = (index + 1) * self.pool.block_size
            self.block_serials.append(
                self.pool.cache_block(self.block_table[index], parent, token_ids, length, self.scope)
            )

    @property
    def end_of_step_copies(self) -> list[tuple[int, int]]:
        """State copies to run after the step: from the sequence's own slot to each save at its end."""
        return [
            (self.state_slot, save.slot)
            for save in self.state_saves
            if self.state_slot is not None and save.length == self.length
        ]

    def cache_saved_state(self, save: StateSave) -> None:
        """Add a saved state to the prefix index, where it may be evicted, or free it if it is inside a block."""
        slots, size = self.pool.state_slots, self.pool.block_size
        if save.length % size == 0:
            serial = self.block_serials[save.length // size - 1]
            if save.replaces_last:
                if self.last_rolling_serial in slots.cached and self.last_rolling_serial != serial:
                    slots.remove_from_index(slots.cached[self.last_rolling_serial])
                self.last_rolling_serial = serial
            slots.add_to_index(save.slot, serial)
        slots.release(save.slot)

    def fork(self) -> "SequenceState":
        """Return a second sequence that shares all tokens so far."""
        copy = SequenceState(self.pool, scope=self.scope)
        used_blocks = -(-self.length // self.pool.block_size)  # excludes blocks left over by a failed extend
        copy.block_table = [self.pool.share(block) for block in self.block_table[:used_blocks]]
        copy.block_serials = list(self.block_serials)
        copy.length = self.length
        copy.state_slot = None if self.state_slot is None else self.pool.state_slots.share(self.state_slot)
        for save in self.state_saves:
            self.pool.state_slots.share(save.slot)
        copy.state_saves = list(self.state_saves)
        return copy

    def snapshot(self) -> "Snapshot":
        """Return a snapshot that stays valid, whatever happens to this sequence."""
        return Snapshot(self.fork())

    def free(self) -> None:
        self.rollback(0)


class Snapshot:
    """A frozen sequence: `fork()` continues from it any number of times, `free()` releases it."""

    def __init__(self, frozen: SequenceState):
        self.frozen = frozen
        self.length = frozen.length

    def fork(self) -> SequenceState:
        return self.frozen.fork()

    def free(self) -> None:
        self.frozen.free()

"""Numbered cache blocks: in use with a reference count, or free and kept for prefix caching until evicted.

Pure Python without tensors. Copies that must happen before a block is written are listed in `pending_copies`; the
owner of the tensors executes them in order before the next step, so a block may be allocated again while a copy
from it is still pending.
"""

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as ListLike
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


ZERO_SOURCE = -1  # as the source of a copy: fill with zeros


class OutOfBlocks(Exception):
    """Every block, or every state slot, is in use."""


class BlockAllocator(Generic[Key]):
    def __init__(self, count: int):
        self.count = count
        self.ref_counts = [0] * count
        self.key_of: dict[int, Key] = {}  # block -> key of its content
        self.cached: dict[Key, int] = {}
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # least recently used first
        self.pending_copies: list[tuple[int, int]] = []  # (from, to)

    @property
    def free_count(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self.free_queue)

    def allocate(self) -> int:
        """Allocate the least recently used free block for writing. Raises OutOfBlocks."""
        if not self.free_queue:
            raise OutOfBlocks
        return self.allocate_block(next(iter(self.free_queue)))

    def allocate_block(self, block: int) -> int:
        self.evict(block)
        del self.free_queue[block]
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> int:
        self.free_queue.pop(block, None)
        self.ref_counts[block] += 1
        return block

    def unused_count(self, blocks: ListLike[int]) -> int:
        """Return how many free blocks sharing these takes: those that no sequence uses."""
        return sum(not self.ref_counts[block] for block in blocks)

    def mark_used(self, blocks: ListLike[int]) -> None:
        """Mark cached blocks as used now, so that others are evicted before them."""
        for block in blocks:
            if block in self.free_queue:
                self.free_queue.move_to_end(block)

    def release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_queue[block] = None
            # Reuse a block without cached content first.
            self.free_queue.move_to_end(block, last=block in self.key_of)

    def make_writable(self, block: int) -> int:
        """Return a block with the same content that may be written to.

        This is the block itself, or a copy if the block is shared or in the prefix index. Raises OutOfBlocks.
        """
        if self.ref_counts[block] == 1 and block not in self.key_of:
            return block
        if self.ref_counts[block] == 1 and not self.free_queue:
            self.evict(block)
            return block
        copy = self.allocate()
        self.pending_copies.append((block, copy))
        self.release(block)
        return copy

    def add_to_index(self, block: int, key: Key) -> None:
        """Make the block's content available under `key`, unless another block already has it."""
        if key not in self.cached:
            self.key_of[block], self.cached[key] = key, block

    def evict(self, block: int) -> None:
        """Remove the block from the prefix index, because it is about to be overwritten."""
        self.remove_from_index(block)

    def remove_from_index(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.cached[key]
            if block in self.free_queue:
                self.free_queue.move_to_end(block, last=False)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index and drop pending copies, after a failed step that may not have executed them."""
        for block in list(self.key_of):
            self.remove_from_index(block)
        self.pending_copies.clear()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the pending copies and clear the list."""
        copies, self.pending_copies = tuple(self.pending_copies), []
        return copies

    def check_invariants(self) -> None:
        """Assert that every block is either in use or free, and that the index is consistent: for tests."""
        assert all((self.ref_counts[block] == 0) == (block in self.free_queue) for block in range(self.count))
        assert all(self.cached[key] == block for block, key in self.key_of.items())
        assert len(self.key_of) == len(self.cached)

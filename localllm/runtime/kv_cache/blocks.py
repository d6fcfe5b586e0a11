"""Numbered blocks of a cache: in use with a reference count, or free and kept for prefix caching until evicted.

Pure Python that knows nothing of tensors. A copy that must happen before a block is written to is listed in
`pending_copies`; the owner of the tensors carries the copies out in order before the next step, so a block may be
handed out again while a copy from it is still pending."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


ZERO_SOURCE = -1  # as the source of a copy


class OutOfBlocks(Exception):
    """Every block, or every row, is in use."""


class BlockAllocator(Generic[Key]):
    def __init__(self, count: int):
        self.count = count
        self.ref_counts = [0] * count
        self.key_of: dict[int, Key] = {}  # place -> what it holds
        self.cached: dict[Key, int] = {}
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # next to be reused first
        self.pending_copies: list[tuple[int, int]] = []  # (from, to)

    @property
    def free_count(self) -> int:
        """How many can be taken now."""
        return len(self.free_queue)

    def allocate(self) -> int:
        """One to write to: the least recently used. Raises OutOfBlocks."""
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

    def release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_queue[block] = None
            self.free_queue.move_to_end(block, last=block in self.key_of)  # without content: reuse it first

    def make_writable(self, block: int) -> int:
        """A place with the same content that may be written to: itself, or a copy where somebody else uses it or
        may find it. Raises OutOfBlocks."""
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
        """Let others find its content by `key`, unless they find the same elsewhere."""
        if key not in self.cached:
            self.key_of[block], self.cached[key] = key, block

    def evict(self, block: int) -> None:
        """It is about to be written to: what it holds cannot be found there any more."""
        self.remove_from_index(block)

    def remove_from_index(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.cached[key]
            if block in self.free_queue:
                self.free_queue.move_to_end(block, last=False)

    def reset_prefix_cache(self) -> None:
        """As after a step that broke off: nobody knows what was copied and computed."""
        for place in list(self.key_of):
            self.remove_from_index(place)
        self.pending_copies.clear()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies to do now; the list is empty after that."""
        copies, self.pending_copies = tuple(self.pending_copies), []
        return copies

    def check_invariants(self) -> None:
        """Every place is in use or idle, and what is named can be found: for tests and when idle."""
        assert all((self.ref_counts[place] == 0) == (place in self.free_queue) for place in range(self.count))
        assert all(self.cached[key] == place for place, key in self.key_of.items())
        assert len(self.key_of) == len(self.cached)

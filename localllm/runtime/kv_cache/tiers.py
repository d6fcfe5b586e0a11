"""A block allocator with two tiers: blocks on the device, and a host tier in main memory for evicted blocks that a
later prompt may need. Pure Python, like `blocks.py`.

Block ids from `count` on are in the host tier. No sequence uses one directly: its content is copied back to the
device first. A content is in one tier at a time, so a copy between tiers moves it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.kv_cache.blocks import BlockAllocator, Key

MERGE_WINDOW = 2  # copy runs: evictions to the host tier and copies back alternate


class TieredBlockAllocator(BlockAllocator[Key]):
    def __init__(self, count: int, host_blocks: int = 0):
        super().__init__(count)
        self.ref_counts += [0] * host_blocks
        # Least recently used first.
        self.host_queue = OrderedDict[int, None].fromkeys(range(count, count + host_blocks))
        self.offloaded_count = self.restored_count = 0  # blocks moved to the host tier and back so far

    def evict(self, block: int) -> None:
        if not self.host_queue or block not in self.key_of:
            self.drop(block)
            return
        host_block = next(iter(self.host_queue))
        self.drop(host_block)
        self.pending_copies.append((block, host_block))
        self.offloaded_count += 1
        self.move_key(block, host_block)

    def drop(self, block: int) -> None:
        """Remove a block from the prefix index whose content goes to no tier of this allocator."""
        self.remove_from_index(block)

    def share_on_device(self, blocks: ListLike[int]) -> list[int]:
        """Share cached blocks, copying those in the host tier back to the device. Returns their device block ids.

        At most `free_count` of the blocks may be unused.
        """
        for block in blocks:
            if block < self.count:
                self.share(block)
            else:
                del self.host_queue[block]  # so that making space for another block does not overwrite it
        return [block if block < self.count else self.copy_from_host(block) for block in blocks]

    def copy_from_host(self, host_block: int) -> int:
        block = self.allocate()
        self.pending_copies.append((host_block, block))
        self.restored_count += 1
        self.host_queue[host_block] = None
        self.move_key(host_block, block)
        return block

    def mark_used(self, blocks: ListLike[int]) -> None:
        super().mark_used(blocks)
        for block in blocks:
            if block in self.host_queue:
                self.host_queue.move_to_end(block)

    def add_to_index(self, block: int, key: Key) -> None:
        host_block = self.cached.get(key)
        if host_block in self.host_queue:  # an evicted block has been recomputed
            self.move_key(host_block, block)
        else:
            super().add_to_index(block, key)

    def move_key(self, source: int, target: int) -> None:
        """Move the index entry of `source` to `target`."""
        key = self.key_of.pop(source)
        self.key_of[target], self.cached[key] = key, target
        if source in self.host_queue:
            self.host_queue.move_to_end(source, last=False)
        if target in self.host_queue:
            self.host_queue.move_to_end(target)

    def remove_from_index(self, block: int) -> None:
        super().remove_from_index(block)
        if block in self.host_queue:
            self.host_queue.move_to_end(block, last=False)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert sorted(self.host_queue) == list(range(self.count, len(self.ref_counts)))
        assert not any(self.ref_counts[self.count :])


class CopyRun(NamedTuple):
    """A copy of adjacent blocks to adjacent blocks."""

    source: int
    target: int
    length: int

    def is_continued_by(self, source: int, target: int) -> bool:
        """Return whether this copy extends the run without its sources and targets overlapping."""
        is_adjacent = (source, target) == (self.source + self.length, self.target + self.length)
        return is_adjacent and abs(source - target) > self.length

    def conflicts_with(self, source: int, target: int) -> bool:
        """Return whether the order of this copy and the run matters."""
        written = range(self.target, self.target + self.length)
        return source in written or target in written or target in range(self.source, self.source + self.length)


def merge_copies(copies: Iterable[tuple[int, int]]) -> tuple[CopyRun, ...]:
    """Merge copies (from, to), given in order of execution, into as few runs as possible."""
    runs: list[CopyRun] = []
    for copy in copies:
        for i in range(len(runs) - 1, max(-1, len(runs) - 1 - MERGE_WINDOW), -1):
            if runs[i].is_continued_by(*copy):
                runs[i] = runs[i]._replace(length=runs[i].length + 1)
                break
            if runs[i].conflicts_with(*copy):
                runs.append(CopyRun(*copy, 1))
                break
        else:
            runs.append(CopyRun(*copy, 1))
    return tuple(runs)

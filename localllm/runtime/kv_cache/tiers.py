"""A block allocator with two tiers: blocks on the device, and a host tier in main memory that holds evicted
blocks which a later prompt may ask for. Pure Python, as `blocks.py`.

Block ids from `count` on are in the host tier. No sequence uses one directly: its content is copied back to the
device first. A content is in one tier at a time, so a copy between tiers moves it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from localllm.runtime.kv_cache.blocks import BlockAllocator, Key

MERGE_WINDOW = 2  # runs: putting aside and bringing back take turns


class TieredBlockAllocator(BlockAllocator[Key]):
    def __init__(self, count: int, host_blocks: int = 0):
        super().__init__(count)
        self.ref_counts += [0] * host_blocks
        self.host_queue = OrderedDict[int, None].fromkeys(
            range(count, count + host_blocks)
        )  # next to be reused first

    def evict(self, block: int) -> None:
        if not self.host_queue or block not in self.key_of:
            self.remove_from_index(block)
            return
        there = next(iter(self.host_queue))
        self.remove_from_index(there)
        self.pending_copies.append((block, there))
        self.move_key(block, there)

    def share_on_device(self, blocks: ListLike[int]) -> list[int]:
        """Take part in contents, each by its place; where they lie on the device then. Of those that nobody uses
        there may be no more than `available`."""
        for place in blocks:
            if place < self.count:
                self.share(place)
            else:
                del self.host_queue[place]  # before room is made for another: it must not be what goes
        return [place if place < self.count else self.copy_from_host(place) for place in blocks]

    def copy_from_host(self, host_block: int) -> int:
        place = self.allocate()
        self.pending_copies.append((host_block, place))
        self.host_queue[host_block] = None
        self.move_key(host_block, place)
        return place

    def add_to_index(self, block: int, key: Key) -> None:
        there = self.cached.get(key)
        if there in self.host_queue:  # what was put aside has been computed again
            self.move_key(there, block)
        else:
            super().add_to_index(block, key)

    def move_key(self, source: int, target: int) -> None:
        """What is in one place is found in another from now on."""
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
    """Neighbours that are copied to neighbours."""

    source: int
    target: int
    length: int

    def is_continued_by(self, source: int, target: int) -> bool:
        """Is this its next copy? What it reads and what it writes stay apart."""
        behind = (source, target) == (self.source + self.length, self.target + self.length)
        return behind and abs(source - target) > self.length

    def conflicts_with(self, source: int, target: int) -> bool:
        """Does it matter which of the two is done first?"""
        written = range(self.target, self.target + self.length)
        return source in written or target in written or target in range(self.source, self.source + self.length)


def merge_copies(copies: Iterable[tuple[int, int]]) -> tuple[CopyRun, ...]:
    """As few as can be made of copies, (from, to), that are to be done in their order."""
    found: list[CopyRun] = []
    for copy in copies:
        for back in range(len(found) - 1, max(-1, len(found) - 1 - MERGE_WINDOW), -1):
            if found[back].is_continued_by(*copy):
                found[back] = found[back]._replace(length=found[back].length + 1)
                break
            if found[back].conflicts_with(*copy):
                found.append(CopyRun(*copy, 1))
                break
        else:
            found.append(CopyRun(*copy, 1))
    return tuple(found)

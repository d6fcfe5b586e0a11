"""The tiers below a simulated KV cache: what moves between them, and how long that takes.

Blocks in main memory are those of the product's own allocator. The disk tier here follows the rules of the
product's (`runtime/kv_cache/disk_tier.py`), without files and threads: blocks that leave memory are written behind
the computation, and a prompt waits until those that it begins with are read, unless computing them is faster.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from localllm.errors import UsageError
from localllm.formatting import parse_bytes
from localllm.metrics import DiskStats, TierMove
from localllm.runtime.kv_cache.disk_tier import (
    FILE_S,
    MAX_BACKLOG_BYTES,
    MAX_LOADS,
    MIN_MEASURED_TOKENS,
    RATE_WEIGHT,
    READ_BYTES_PER_S,
)
from localllm.runtime.kv_cache.lower_tier import NOTHING_TO_LOAD, PrefixLoad
from localllm.runtime.kv_cache.prefix_copy import SEGMENT_BLOCKS
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks

ASSUMED_HOST_BANDWIDTH = (
    25e9  # bytes per second between a GPU and main memory: PCIe 4.0 with 16 lanes, in practice
)


@dataclass(frozen=True)
class TierSetup:
    """Sizes and speeds of the tiers below the device's blocks."""

    host_blocks: int = 0
    host_bandwidth: float = 0.0  # bytes per second, one way at a time; 0: the cache is in main memory anyway
    disk_blocks: int = 0
    disk_bandwidth: float = READ_BYTES_PER_S  # of reading and of writing, which do not delay each other
    block_bytes: float = 0.0

    @property
    def move_s(self) -> float:
        """Seconds of a step for each block that moves between device and main memory."""
        return self.block_bytes / self.host_bandwidth if self.host_bandwidth else 0.0


NO_TIERS = TierSetup()


def parse_tier(text: str, flag: str, bandwidth: float) -> tuple[int, float]:
    """Parse `200GB` or `200GB,12GB/s`: bytes, and bytes per second. bandwidth: the default. Raises UsageError."""
    size, comma, rate = text.partition(",")
    if comma and not rate.endswith("/s"):
        raise UsageError(f"{flag} is {text!r}", "give a size, or also a bandwidth: 200GB,12GB/s")
    return parse_bytes(size.strip()), parse_bytes(rate.strip().removesuffix("/s")) if comma else bandwidth


class NamedBlockPool(BlockPool):
    """A pool that knows a name of each cached block, which is the same whenever its tokens and all before them
    are; serials are not."""

    def __init__(self, blocks: int, block_size: int, state_slots: int = 0, host_blocks: int = 0):
        super().__init__(blocks, block_size, state_slots, host_blocks)
        self.names: dict[int, int] = {}  # by serial

    def name_after(self, parent: int, tokens: ListLike[int]) -> int:
        """Return the name of a block behind the one with the name `parent`."""
        return hash((parent, *tokens))

    def cache_block(
        self, block: int, parent_serial: int, token_ids: ListLike[int], length: int, scope: str = ""
    ) -> int:
        serial = super().cache_block(block, parent_serial, token_ids, length, scope)
        if serial not in self.names:
            tokens = token_ids[length - self.block_size : length]
            self.names[serial] = self.name_after(self.names.get(parent_serial, parent_serial), tokens)
        return serial

    def remove_from_index(self, block: int) -> None:
        key = self.key_of.get(block)
        serial = None if key is None else self.serial_of[key]
        super().remove_from_index(block)
        if serial is not None:
            self.names.pop(serial, None)


@dataclass
class DiskContent:
    """The blocks on a disk, which outlive an engine."""

    written_at: OrderedDict[int, float] = field(
        default_factory=OrderedDict[int, float]
    )  # by name, oldest use first
    write_free_at: float = 0.0  # when everything has been written


@dataclass(eq=False)
class SimulatedLoad:
    """Blocks that one sequence waits for."""

    token_ids: ListLike[int]
    scope: str
    serial: int  # of the last block that is in the cache
    end: int  # block of the sequence behind the last one to load
    done: bool = False
    tokens: int = 0
    computed: int = 0  # by other processes
    began: float = 0.0


class SimulatedDisk:
    """Connects a pool with the content of a disk. Implements `LowerTier`."""

    max_loads = MAX_LOADS
    writes_evicted = True

    def __init__(self, setup: TierSetup, pool: NamedBlockPool, content: DiskContent, clock: Callable[[], float]):
        self.setup, self.pool, self.content, self.clock = setup, pool, content, clock
        self.counts = DiskStats()
        self.token_s: float | None = None  # measured time to compute a prompt's token
        self.read_free_at = 0.0
        self.reads: deque[tuple[float, SimulatedLoad, int, int]] = deque()  # when each is read: a range of blocks
        self.moved_blocks = 0  # between device and main memory, on their way
        pool.lower = self

    @property
    def moves(self) -> dict[str, TierMove]:
        return self.counts.moves

    def cancel_load(self, load: PrefixLoad) -> None:
        """Install nothing more of a prefix."""
        if isinstance(load, SimulatedLoad):
            load.done = True

    @property
    def next_at(self) -> float:
        """When the next blocks are read; infinity if none are awaited."""
        return self.reads[0][0] if self.reads else math.inf

    def before_drop(self, serial: int) -> None:
        """Write a block, which is about to be overwritten, and those behind it that belong to the same file."""
        pool, stack = self.pool, [serial]
        while stack:
            current = stack.pop()
            self.write(current)
            if pool.prefixes[current].length % (SEGMENT_BLOCKS * pool.block_size):
                stack.extend(pool.successors.get(current, ()))

    def write(self, serial: int) -> None:
        """Write a block, unless it is on the disk or the disk cannot keep up."""
        setup, content, name = self.setup, self.content, self.pool.names[serial]
        if name in content.written_at:
            content.written_at.move_to_end(name)
            return
        begin = max(self.clock(), content.write_free_at)
        if (begin - self.clock()) * setup.disk_bandwidth > MAX_BACKLOG_BYTES:
            self.counts.skipped_segments += 1
            return
        seconds = setup.block_bytes / setup.disk_bandwidth
        content.write_free_at = content.written_at[name] = begin + seconds
        self.counts.written_bytes += int(setup.block_bytes)
        self.counts.written_tokens += self.pool.block_size
        self.counts.write_s += seconds
        self.moved_blocks += not setup.host_blocks  # otherwise it is in main memory already
        while len(content.written_at) > setup.disk_blocks:
            content.written_at.popitem(last=False)

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        pool, size, now = self.pool, self.pool.block_size, self.clock()
        max_blocks = (len(token_ids) - 1) // size  # the last token is computed in any case
        serial, blocks = pool.root_of(scope), list[int]()
        while len(blocks) < max_blocks:
            begin = len(blocks) * size
            key = (serial, *token_ids[begin : begin + size])
            if key not in pool.cached:
                break
            blocks.append(pool.cached[key])
            serial = pool.serial_of[key]
        begin = end = len(blocks)
        name = pool.names.get(serial, serial)
        while end < max_blocks:
            name = pool.name_after(name, token_ids[end * size : (end + 1) * size])
            if self.content.written_at.get(name, math.inf) > now:
                break
            self.content.written_at.move_to_end(name)
            end += 1
        if end == begin or not self.is_worthwhile(begin, end):
            return NOTHING_TO_LOAD
        pool.mark_used(blocks)
        if end - begin > pool.free_count - pool.unused_count(blocks):
            return NOTHING_TO_LOAD
        load = SimulatedLoad(token_ids, scope, serial, end)
        while begin < end:
            first = begin // SEGMENT_BLOCKS * SEGMENT_BLOCKS  # files are read as a whole
            until = min(end, first + SEGMENT_BLOCKS)
            seconds = FILE_S + (until - first) * self.setup.block_bytes / self.setup.disk_bandwidth
            self.read_free_at = max(now, self.read_free_at) + seconds
            self.reads.append((self.read_free_at, load, begin, until))
            self.counts.read_files += 1
            self.counts.read_bytes += int((until - first) * self.setup.block_bytes)
            self.counts.read_s += seconds
            begin = until
        return load

    def is_worthwhile(self, begin: int, end: int) -> bool:
        """Return whether reading these blocks is faster than computing them, as far as that was measured."""
        if self.token_s is None:
            return True
        files = -(-end // SEGMENT_BLOCKS) - begin // SEGMENT_BLOCKS
        read_s = (end - begin) * self.setup.block_bytes / self.setup.disk_bandwidth + files * FILE_S
        is_faster = read_s < (end - begin) * self.pool.block_size * self.token_s
        self.counts.slower_loads += not is_faster
        return is_faster

    def install_loaded(self, *, wait_s: float = 0.0) -> bool:
        """Add what has been read to the prefix cache, and return whether any sequence waited."""
        was_awaited = bool(self.reads)
        while self.reads and self.reads[0][0] <= self.clock():
            _, load, begin, end = self.reads.popleft()
            if not load.done:
                load.done = not self.install(load, begin, end) or end == load.end
        return was_awaited

    def install(self, load: SimulatedLoad, begin: int, end: int) -> bool:
        """Return whether the blocks before these are still cached, and there is space."""
        pool, size = self.pool, self.pool.block_size
        if load.serial > 0 and load.serial not in pool.names:
            return False
        for index in range(begin, end):
            key = (load.serial, *load.token_ids[index * size : (index + 1) * size])
            if key in pool.cached:  # computed meanwhile
                load.serial = pool.serial_of[key]
                continue
            try:
                block = pool.allocate()
            except OutOfBlocks:
                return False
            load.serial = pool.cache_block(block, load.serial, load.token_ids, (index + 1) * size, load.scope)
            pool.release(block)
            load.tokens += size
            self.counts.loaded_tokens += size
            self.moved_blocks += 1
        return True

    def record_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_MEASURED_TOKENS and seconds > 0:
            rate = seconds / tokens
            self.token_s = rate if self.token_s is None else self.token_s + RATE_WEIGHT * (rate - self.token_s)

    def keep(self, serial: int) -> None:
        """Nothing is kept by request."""

    def close(self) -> None:
        """Nothing is written at the end."""

"""Global and shared memory with what a GPU does not check: bounds, alignment, initialization and data races.

Memory is divided into *units*, as long as the kernel's narrowest access. Each unit knows whether it belongs to a
tensor, whether it was written, and which threads accessed it last and when.

**When** is a clock. A warp's clock advances with its barriers, `bar.warp.sync` too. Two accesses of the same
unit, at least one of which writes, are ordered if a chain of the following leads from one to the other; else
they are a race, whichever came first here:

- program order in one thread,
- a barrier of the warp, between threads of one warp,
- `bar.sync`, between warps of one block,
- a release and an acquire on one counter, between blocks (`atom.acq_rel`).
"""

from dataclasses import dataclass, field

import numpy as np

from tools.ptx.rounding import Array

WARP = 32  # threads
NOBODY, ANYBODY = np.int32(-1), np.int32(-(2**31))  # no thread; threads of several blocks
NEVER = np.int32(-1)  # a clock before every other


class Fault(Exception):
    """A kernel did what it must not; the machine adds which instruction and thread."""


class OutOfBoundsError(Fault):
    pass


class MisalignedError(Fault):
    pass


class UninitializedError(Fault):
    pass


class RaceError(Fault):
    pass


class PrematureError(Fault):
    """Memory was touched before `griddepcontrol.wait`, while the previous kernel may still run."""


class DivergenceError(Fault):
    """Threads wait for others that never come."""


@dataclass
class Clocks:
    """The times of all threads of a grid.

    An agent is a thread, numbered across blocks; or, if several accessed a unit, their warp, block or grid: -2 -
    warp, -2 - warps - block, or ANYBODY.
    """

    block_threads: int
    blocks: int
    warp: Array = field(init=False)  # of each warp of the grid
    barrier: Array = field(init=False)  # of each block, when its last barrier ended
    acquired: dict[int, Array] = field(
        default_factory=dict
    )  # by block: the times of others that it is ordered after
    released: dict[int, Array] = field(default_factory=dict)  # by address of a counter, likewise

    def __post_init__(self) -> None:
        self.warp = np.zeros(self.blocks * self.block_threads // WARP, np.int32)
        self.barrier = np.zeros(self.blocks, np.int32)

    @property
    def warps_per_block(self) -> int:
        return self.block_threads // WARP

    def warps_met(self, warps: Array) -> None:
        """Record that each of these warps passed a barrier of its own."""
        self.warp[warps] += 1
        if self.warps_per_block == 1:
            self.barrier[warps] = self.warp[warps]

    def block_met(self, block: int) -> None:
        of_block = slice(block * self.warps_per_block, (block + 1) * self.warps_per_block)
        self.warp[of_block] = self.barrier[block] = self.warp[of_block].max() + 1

    def release(self, block: int, counter: int) -> None:
        """Publish, with a counter, all that is ordered before by a barrier of this block."""
        known = self.acquired.get(block, np.zeros(self.blocks, np.int32)).copy()
        known[block] = self.barrier[block]
        self.released[counter] = np.maximum(self.released.get(counter, 0), known)

    def acquire(self, block: int, counter: int) -> None:
        if counter in self.released:
            self.acquired[block] = np.maximum(self.acquired.get(block, 0), self.released[counter])

    def groups(self, agent: Array) -> tuple[Array, Array]:
        """Return warp and block of each agent; where there is none, a negative number."""
        is_warp = (agent < NOBODY) & (agent > -2 - len(self.warp))
        warp = np.where(agent >= 0, agent // WARP, np.where(is_warp, -2 - agent, -1))
        is_block = (agent <= -2 - len(self.warp)) & (agent != ANYBODY)
        block = np.where(is_block, -2 - len(self.warp) - agent, -1)
        return warp, np.where(warp >= 0, warp // self.warps_per_block, block)

    def join(self, first: Array, second: Array) -> Array:
        """Return the smallest agent that contains both."""
        (first_warp, first_block), (warp, block) = self.groups(first), self.groups(second)
        joined = np.where(first_block == block, -2 - len(self.warp) - block, ANYBODY)
        joined = np.where((first_warp == warp) & (warp >= 0), -2 - warp, np.where(block >= 0, joined, ANYBODY))
        return np.where((first == second) | (first == NOBODY), second, joined).astype(np.int32)

    def unordered(self, earlier: Array, when: Array, agent: Array, is_of_block: bool) -> Array:
        """Return where an access by `earlier` at its clock `when` is not ordered before one by a thread now.

        is_of_block: all are threads of the same block, as in shared memory.
        """
        someone = (earlier != NOBODY) & (earlier != agent)
        block, warp = agent // self.block_threads, agent // WARP
        if is_of_block:  # what was before its last barrier is ordered
            someone &= when >= self.barrier[block]
        if not someone.any():
            return someone
        other_warp, other_block = self.groups(earlier)
        same_block = other_block == block
        ordered = np.where(other_warp == warp, when < self.warp[warp], same_block & (when < self.barrier[block]))
        if self.acquired:
            foreign = someone & ~same_block & (other_block >= 0)
            for own in self.acquired.keys() & set(np.unique(block[foreign]).tolist()):
                at = foreign & (block == own)
                ordered[at] = when[at] < self.acquired[own][other_block[at]]
        return someone & ~ordered


class Memory:
    """Bytes in units; an address is already an index of `bytes`."""

    is_of_block = True  # shared memory

    def __init__(self, content: Array, unit: int, clocks: Clocks) -> None:
        assert content.nbytes % 16 == 0 and content.ctypes.data % 16 == 0
        self.bytes = content
        self.unit = unit
        self.clocks = clocks
        count = content.nbytes // unit
        self.written = np.zeros(count, bool)  # holds a value
        self.in_flight = np.zeros(count, bool)  # will be overwritten by cp.async
        self.writer, self.write_time = np.full(count, NOBODY), np.full(count, NEVER)
        self.reader, self.read_time = np.full(count, NOBODY), np.full(count, NEVER)
        self.atomic = np.zeros(count, bool)  # the last write was an atomic

    def units(self, address: Array, size: int) -> Array:
        """Return the units of accesses of `size` bytes, [accesses, units]."""
        return (address // self.unit)[:, None] + np.arange(size // self.unit)

    def load(self, address: Array, size: int, agent: Array, *, tracked: bool = True) -> Array:
        """Return bytes [accesses, size]. tracked: somebody may write here."""
        units = self.units(address, size)
        self.check_content(units)
        if tracked:
            self.note_read(units, agent)
        return self.peek(address, size)

    def check_content(self, units: Array) -> None:
        if not self.written[units].all():
            raise UninitializedError(f"{_where(~self.written[units])} reads what nobody has written")
        if self.in_flight[units].any():
            raise RaceError(f"{_where(self.in_flight[units])} reads what an unfinished cp.async will write")

    def peek(self, address: Array, size: int) -> Array:
        word = min(size, 8)
        words = self.bytes.view(f"u{word}")[(address // word)[:, None] + np.arange(size // word)]
        return words.view(np.uint8).reshape(len(address), size)

    def store(self, address: Array, content: Array, agent: Array) -> None:
        """Write bytes [accesses, size]."""
        units = self.units(address, content.shape[1])
        if self.in_flight[units].any():
            raise RaceError(f"{_where(self.in_flight[units])} writes what an unfinished cp.async will write")
        self.note_write(units, agent, address, content)
        self.poke(address, content)
        if not np.array_equal(self.peek(address, content.shape[1]), content):
            raise RaceError("two threads write different values to one address")

    def poke(self, address: Array, content: Array) -> None:
        word = min(content.shape[1], 8)
        index = (address // word)[:, None] + np.arange(content.shape[1] // word)
        self.bytes.view(f"u{word}")[index] = np.ascontiguousarray(content).view(f"u{word}")

    def note_read(self, units: Array, agent: Array) -> None:
        clocks, agents = self.clocks, np.broadcast_to(agent[:, None], units.shape)
        self.check_order(self.writer, self.write_time, units, agents, "written", "reads")
        before, when = self.reader[units], self.read_time[units]
        joined, latest = agents, clocks.unordered(before, when, agents, self.is_of_block)
        if latest.any():
            joined = np.where(latest, clocks.join(before, agents), agents)
        self.read_time[units] = clocks.warp[agents // WARP]
        # Of several threads that read one unit in this instruction, an assignment keeps the last.
        self.reader[units[::-1]] = joined[::-1]
        first = self.reader[units]
        self.reader[units] = joined
        last = self.reader[units]
        if not np.array_equal(first, last):
            self.reader[units] = clocks.join(first, last)

    def note_write(
        self,
        units: Array,
        agent: Array,
        address: Array,
        content: Array | None,
        *,
        atomic: bool = False,
        published: bool = False,
    ) -> None:
        """published: the write is itself the release that others acquire."""
        agents = np.broadcast_to(agent[:, None], units.shape)
        self.check_order(
            self.writer, self.write_time, units, agents, "written", "writes", address, content, atomic
        )
        self.check_order(self.reader, self.read_time, units, agents, "read", "writes", address, content)
        self.writer[units] = agents
        self.write_time[units] = self.clocks.warp[agents // WARP] - published
        self.atomic[units] = atomic
        self.written[units] = True

    def check_order(
        self,
        earlier: Array,
        time: Array,
        units: Array,
        agents: Array,
        done: str,
        doing: str,
        address: Array | None = None,
        content: Array | None = None,
        atomic: bool = False,
    ) -> None:
        who, when = earlier[units], time[units]
        race = self.clocks.unordered(who, when, agents, self.is_of_block)
        if atomic:
            race &= ~self.atomic[units]
        if race.any() and address is not None and content is not None:  # a write that changes nothing is harmless
            changed = self.peek(address, content.shape[1]) != content
            race &= changed.reshape(*units.shape, self.unit).any(-1)
        if race.any():
            i = int(np.flatnonzero(race)[0])
            later, first = (_name(int(agent.flat[i]), self.clocks) for agent in (agents, who))
            raise RaceError(f"{later} {doing} what {first} has {done}, and nothing orders them")


def _name(agent: int, clocks: Clocks) -> str:
    if agent >= 0:
        return f"thread {agent % clocks.block_threads} of block {agent // clocks.block_threads}"
    warp, block = (int(each) for each in clocks.groups(np.array(agent)))
    if warp >= 0:
        return f"warp {warp % clocks.warps_per_block} of block {block}"
    return f"block {block}" if block >= 0 else "other blocks"


def _where(wrong: Array) -> str:
    return f"access {int(np.flatnonzero(wrong.any(axis=1))[0])} of the instruction"


def aligned_bytes(count: int) -> Array:
    """Return uninitialized bytes at an address that is a multiple of 16."""
    content = np.empty(count + 16, np.uint8)
    start = -content.ctypes.data % 16
    return content[start : start + count]


REGION_BITS = 40  # of an address; what is above numbers the region


@dataclass
class Region:
    """The bytes of tensors that share memory."""

    name: str  # of the parameters
    content: Array
    lead: int  # address modulo 256
    allowed: Array  # of each byte, whether it belongs to a tensor
    written: Array  # of each byte, whether it holds a value
    tracked: bool  # the kernel may write here


class GlobalMemory(Memory):
    """Regions, each in a range of addresses of its own, so that no index error leads from one into another."""

    is_of_block = False

    def __init__(self, regions: list[Region], unit: int, clocks: Clocks) -> None:
        self.regions = regions
        self.lead = np.array([region.lead for region in regions] or [0])
        self.size = np.array([len(region.content) for region in regions] or [0])
        self.tracked = np.array([region.tracked for region in regions] or [False])
        lengths = [-(-(region.lead + len(region.content)) // 256) * 256 for region in regions]
        self.start = np.cumsum([0, *lengths])[:-1]  # index of the byte whose address is a multiple of 256
        super().__init__(aligned_bytes(sum(lengths)), unit, clocks)
        self.allowed = np.zeros(len(self.written), bool)
        for region, at in zip(regions, self.slices(), strict=True):
            self.bytes[at] = np.where(region.written, region.content, 0xFF)
            self.allowed[at.start // unit : -(-at.stop // unit)] = self.by_unit(at, region.allowed)
            self.written[at.start // unit : -(-at.stop // unit)] = self.by_unit(at, region.written)

    def slices(self) -> list[slice]:
        starts = self.start + self.lead
        return [slice(int(a), int(a + n)) for a, n in zip(starts, self.size, strict=False)][: len(self.regions)]

    def by_unit(self, at: slice, flags: Array) -> Array:
        """Return whether a flag is set for all bytes of each unit."""
        before, after = at.start % self.unit, -at.stop % self.unit
        return np.pad(flags, (before, after)).reshape(-1, self.unit).all(1)

    def written_back(self, region: int) -> tuple[Array, Array]:
        """Return the content of a region, and which of its bytes hold a value."""
        at = self.slices()[region]
        return self.bytes[at], np.repeat(self.written, self.unit)[at] if self.unit > 1 else self.written[at]

    def address(self, region: int, offset: int) -> int:
        return (region + 1 << REGION_BITS) + self.regions[region].lead + offset

    def locate(self, address: Array, size: int) -> Array:
        """Return indices of bytes, or raise a fault where a tensor does not contain all of them."""
        if (address % np.uint64(size)).any():
            raise MisalignedError(f"{size} bytes at {self.describe(address[address % np.uint64(size) != 0][0])}")
        region = (address >> np.uint64(REGION_BITS)).astype(np.int64) - 1
        known = (region >= 0) & (region < len(self.regions))
        region = np.where(known, region, 0)
        offset = (address & np.uint64(2**REGION_BITS - 1)).astype(np.int64) - self.lead[region]
        inside = known & (offset >= 0) & (offset + size <= self.size[region])
        index = self.start[region] + self.lead[region] + offset
        if inside.all():
            inside = self.allowed[self.units(index, size)].all(1)
        if not inside.all():
            raise OutOfBoundsError(f"{size} bytes at {self.describe(address[~inside][0])}")
        return index

    def describe(self, address: int) -> str:
        region = (int(address) >> REGION_BITS) - 1
        if not 0 <= region < len(self.regions):
            return f"address {int(address):#x}, in no tensor"
        offset = (int(address) & (2**REGION_BITS - 1)) - self.regions[region].lead
        return f"byte {offset} of {self.regions[region].name} ({self.size[region]} bytes)"

    def is_tracked(self, index: Array) -> bool:
        region = np.searchsorted(self.start, index, side="right") - 1
        return bool(self.tracked[region].any())

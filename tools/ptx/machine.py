"""Executes the blocks of a grid: threads in lockstep where they may be, in adversarial order where they may not.

All threads of a few blocks, a *wave*, are executed together: a register is an array with an element per thread,
and an instruction is one operation on such arrays. Every thread has its own program counter. Among the threads
chosen by the scheduler, those at the lowest one run until they branch, wait or return, so that a warp whose
threads took different branches converges where these meet.

The scheduler runs all warps alternately, or, as the seed decides, some warps of some blocks alone until they
wait. A barrier ends when all threads of its block have arrived. `cp.async` writes when a thread waits for its
group, and not before. What would depend on such choices is a race, which `memory.py` finds in any order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tools.ptx.memory import (
    WARP,
    Clocks,
    DivergenceError,
    Fault,
    GlobalMemory,
    Memory,
    MisalignedError,
    OutOfBoundsError,
    PrematureError,
    aligned_bytes,
)
from tools.ptx.parser import Immediate, Instruction, Name, Program
from tools.ptx.rounding import Array

WAVE_THREADS = 2048  # more would not be executed faster
SHARED_BASE = 1024  # the address of a block's shared memory
POISON = {
    1: np.bool_(False),
    8: np.uint8(0xFF),
    16: np.uint16(0xFFFF),
    32: np.uint32(2**32 - 1),
    64: np.uint64(2**64 - 1),
}
MAX_INSTRUCTIONS = 20_000_000  # of a wave, after which it is taken for an endless loop


class Held(Exception):
    """Threads cannot continue before others of their warp arrive."""

    def __init__(self, threads: Array) -> None:
        self.threads = threads


@dataclass
class AsyncCopy:
    """cp.async of some threads: 4, 8 or 16 bytes each, the first `valid` of them copied, the rest zero."""

    threads: Array
    target: Array  # index in shared memory
    source: Array  # index in global memory
    size: int
    valid: Array
    group: Array  # number of the group, for each thread


@dataclass
class Grid:
    """One launch: what all its blocks have in common."""

    code: "Code"
    size: tuple[int, int, int]
    parameters: dict[str, int]  # bits
    shared_bytes: int
    memory: GlobalMemory
    clocks: Clocks
    random: np.random.Generator
    has_predecessor: bool  # launched while the previous kernel may still run
    early_reads: list[tuple[Array, int]] = field(default_factory=list)  # of global memory, before the wait
    early_triggers: bool = False  # whether the next kernel may start before this one has waited

    @property
    def program(self) -> Program:
        return self.code.program

    @property
    def blocks(self) -> int:
        return self.size[0] * self.size[1] * self.size[2]

    def run(self) -> None:
        threads = self.program.threads
        order = self.random.permutation(self.blocks)
        per_wave = max(1, WAVE_THREADS // threads)
        for first in range(0, self.blocks, per_wave):
            Wave(self, np.sort(order[first : first + per_wave])).run()


Step = Callable[["Wave"], None]


@dataclass
class Code:
    """A program with a function per instruction."""

    program: Program
    steps: list[Step]
    ends: "BlockEnds"
    shared_unit: int
    global_unit: int


class Wave:
    def __init__(self, grid: Grid, blocks: Array) -> None:
        self.grid, self.blocks = grid, blocks
        per_block = grid.program.threads
        count = len(blocks) * per_block
        self.thread = np.tile(np.arange(per_block), len(blocks))  # in its block
        self.slot = np.repeat(np.arange(len(blocks)), per_block)  # of its block in this wave
        self.agent = (blocks[self.slot] * per_block + self.thread).astype(np.int32)
        poison = {bits: np.full(count, value) for bits, value in POISON.items()}
        self.registers = [poison[bits] for bits in grid.program.register_bits]
        self.counter = np.zeros(count, np.int64)
        self.exited, self.parked, self.held = (np.zeros(count, bool) for _ in range(3))
        self.barrier = np.zeros(count, np.int64)  # number of the barrier that a parked thread waits at
        self.waited = np.full(count, not grid.has_predecessor)  # has executed griddepcontrol.wait
        size = max(16, -(-grid.shared_bytes // 16) * 16)
        self.shared_size = size
        content = aligned_bytes(size * len(blocks))
        content[:] = 0xFF
        self.shared = Memory(content, grid.code.shared_unit, grid.clocks)
        self.copies: list[AsyncCopy] = []
        self.groups = np.zeros(count, np.int64)  # committed groups of cp.async
        self.constants: dict[tuple[int, str], Array] = {}
        self.special = self.special_registers()
        self.chosen = np.zeros(count, bool)
        self.index = 0
        self.narrow(np.ones(count, bool))

    def special_registers(self) -> dict[str, Array]:
        width, height, _ = self.grid.size
        block = self.blocks[self.slot]
        count = len(block)
        values = {
            "%tid.x": self.thread,
            "%ctaid.x": block % width,
            "%ctaid.y": block // width % height,
            "%ctaid.z": block // (width * height),
            "%laneid": self.thread % WARP,
            "%warpid": self.thread // WARP,
            "%ntid.x": np.full(count, self.grid.program.threads),
            "global_smem": np.full(count, SHARED_BASE),
        }
        values |= {f"%nctaid.{axis}": np.full(count, n) for axis, n in zip("xyz", self.grid.size, strict=True)}
        values |= {f"%tid.{axis}": np.zeros(count, np.int64) for axis in "yz"}
        return {name: value.astype(np.uint32) for name, value in values.items()}

    # Which threads execute an instruction

    def narrow(self, active: Array) -> None:
        """Let these threads execute what follows."""
        self.active = active
        self.threads = np.flatnonzero(active)
        self.full = len(self.threads) == len(active)

    def whole_warps(self) -> Array:
        """Return the active warps, for an instruction that all threads of a warp execute together."""
        by_warp = self.active.reshape(-1, WARP)
        some = by_warp.any(1)
        if (incomplete := some & ~by_warp.all(1)).any():
            raise Held(self.active & np.repeat(incomplete, WARP))
        return np.flatnonzero(some)

    def assert_members(self, mask: Array) -> None:
        """Wait until every thread of a warp that the mask names executes this instruction."""
        if self.full:
            return
        bits = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
        present = (self.active.reshape(-1, WARP) * bits).sum(1, dtype=np.uint64).astype(np.uint32)
        missing = (mask & ~np.repeat(present, WARP)) != 0
        if (missing & self.active).any():
            raise Held(self.active & missing)

    # Registers

    def constant(self, bits: int, dtype: np.dtype) -> Array:
        key = bits, dtype.str
        if key not in self.constants:
            if dtype.kind == "b":
                self.constants[key] = np.full(len(self.agent), bits != 0)
            else:
                unsigned = np.dtype(f"u{dtype.itemsize}")
                value = unsigned.type(bits % 2 ** (8 * dtype.itemsize))
                self.constants[key] = np.full(len(self.agent), value).view(dtype)
        return self.constants[key]

    def assign(self, register: int, bits: int, value: Array) -> None:
        """Set a register of the active threads, extending a narrower value by zeros or, if signed, its sign."""
        if bits > 1:
            if 8 * value.itemsize < bits:
                value = value.astype(f"{value.dtype.kind}{bits // 8}")
            value = value.view(f"u{bits // 8}")
        self.registers[register] = value if self.full else np.where(self.active, value, self.registers[register])

    def assign_active(self, register: int, bits: int, value: Array) -> None:
        """Likewise, with an element per active thread."""
        if self.full:
            self.assign(register, bits, value)
            return
        spread = np.zeros(len(self.agent), value.dtype)
        spread[self.threads] = value
        self.assign(register, bits, spread)

    # Execution

    def run(self) -> None:
        executed = 0
        ends = self.grid.code.ends
        try:
            while not self.exited.all():
                start, active = self.next_block()
                executed += self.run_block(start, ends[start], active)
                if executed > MAX_INSTRUCTIONS:
                    raise DivergenceError(f"no end after {executed} instructions of a wave")
        except Fault as fault:
            instruction = self.grid.program.instructions[min(self.index, len(self.grid.program.instructions) - 1)]
            raise type(fault)(f"{self.grid.program.name}: {instruction}: {fault}") from fault

    def next_block(self) -> tuple[int, Array]:
        """Choose threads at the lowest program counter among the chosen warps."""
        runnable = ~(self.exited | self.parked | self.held)
        if not runnable.any():
            raise DivergenceError(self.stalemate())
        if not (candidates := runnable & self.chosen).any():
            self.chosen = self.choose(runnable)
            candidates = runnable & self.chosen
        start = int(self.counter[candidates].min())
        return start, candidates & (self.counter == start)

    def choose(self, runnable: Array) -> Array:
        """Return the threads that run until none of them can: all, some blocks, or some warps of one."""
        random = self.grid.random
        match random.integers(4):
            case 0:
                blocks = np.unique(self.slot[runnable])
                some = random.choice(blocks, max(1, len(blocks) // 2), replace=False)
                return np.isin(self.slot, some)
            case 1:
                warps = np.arange(len(self.agent)) // WARP
                present = np.unique(warps[runnable])
                return np.isin(warps, random.choice(present, max(1, len(present) // 2), replace=False))
            case _:
                return np.ones(len(self.agent), bool)

    def stalemate(self) -> str:
        stuck = np.flatnonzero(~self.exited)[0]
        self.index = int(self.counter[stuck]) - int(self.parked[stuck])
        at = "a barrier" if self.parked[stuck] else "an instruction of its whole warp"
        block = self.blocks[self.slot[stuck]]
        return f"thread {self.thread[stuck]} of block {block} waits for others at {at} forever"

    def run_block(self, start: int, end: int, active: Array) -> int:
        """Execute instructions up to the next that may change a program counter, or to a label."""
        self.narrow(active)
        code = self.grid.code.steps
        self.index = start
        while self.index < end:
            try:
                code[self.index](self)
            except Held as held:
                self.counter[held.threads] = self.index
                self.held |= held.threads
                self.narrow(self.active & ~held.threads)
                if not len(self.threads):
                    return self.index - start
                continue
            self.index += 1
        instruction = self.grid.program.instructions[end] if end < len(code) else None
        self.release_held()
        if instruction is not None and changes_counter(instruction):
            code[end](self)
        else:
            self.counter[self.active] = end
        return end - start + 1

    def release_held(self) -> None:
        """Let threads that were held try again, now that others of their warp have moved."""
        if self.held.any():
            self.held &= ~np.repeat(self.active.reshape(-1, WARP).any(1), WARP)

    # Control flow

    def branch(self, taken: Array, target: int) -> None:
        self.counter[self.active] = self.index + 1
        self.counter[self.active & taken] = target

    def leave(self) -> None:
        if not self.waited[self.active].all():
            raise PrematureError("a thread ends without waiting for the previous kernel")
        self.exited |= self.active

    def park(self, number: int) -> None:
        """Wait for the whole block."""
        self.counter[self.active] = self.index + 1
        self.parked |= self.active
        self.barrier[self.active] = number
        for slot, (parked, barrier) in enumerate(
            zip(self.parked.reshape(len(self.blocks), -1), self.barrier.reshape(len(self.blocks), -1), strict=True)
        ):
            if parked.all() and (barrier == barrier[0]).all():
                parked[:] = False
                self.grid.clocks.block_met(int(self.blocks[slot]))

    # Asynchronous copies

    def complete_copies(self, pending: int) -> None:
        """Finish the copies of the active threads, except those of their `pending` newest groups."""
        remaining: list[AsyncCopy] = []
        for copy in self.copies:
            due = self.active[copy.threads] & (copy.group < self.groups[copy.threads] - pending)
            if due.any():
                self.complete(_part(copy, due))
            if not due.all():
                remaining.append(_part(copy, ~due))
        self.copies = remaining

    def complete(self, copy: AsyncCopy) -> None:
        content = np.zeros((len(copy.threads), copy.size), np.uint8)
        for valid in np.unique(copy.valid).tolist():
            if valid:
                at = copy.valid == valid
                content[at, :valid] = self.load_global(copy.source[at], valid, copy.threads[at])
        units = self.shared.units(copy.target, copy.size)
        self.shared.in_flight[units] = False
        self.shared.store(copy.target, content, self.agent[copy.threads])

    # Memory

    def shared_index(self, address: Array, size: int, threads: Array) -> Array:
        offset = address.astype(np.int64) - SHARED_BASE
        if (offset % size).any():
            raise MisalignedError(f"shared memory: {size} bytes at {offset[offset % size != 0][0]}")
        outside = (offset < 0) | (offset + size > self.grid.shared_bytes)
        if outside.any():
            raise OutOfBoundsError(
                f"shared memory: {size} bytes at {offset[outside][0]} of {self.grid.shared_bytes}"
            )
        return self.slot[threads] * self.shared_size + offset

    def load_global(self, index: Array, size: int, threads: Array) -> Array:
        """Load from where the tensors are known to contain the bytes."""
        memory, grid = self.grid.memory, self.grid
        early = ~self.waited[threads]
        if early.any():
            grid.early_reads.append((index[early], size))
        return memory.load(index, size, self.agent[threads], tracked=memory.is_tracked(index))

    def check_waited(self, threads: Array) -> None:
        if not self.waited[threads].all():
            raise PrematureError("writes global memory that the previous kernel may still use")


def _part(copy: AsyncCopy, at: Array) -> AsyncCopy:
    return AsyncCopy(copy.threads[at], copy.target[at], copy.source[at], copy.size, copy.valid[at], copy.group[at])


def changes_counter(instruction: Instruction) -> bool:
    return instruction.opcode in ("bra", "bra.uni", "ret", "exit", "bar.sync", "barrier.sync", "barrier.cta.sync")


class BlockEnds(dict[int, int]):
    """From an index to the end of the basic block that contains it: its last instruction if that changes a
    counter, or the next label that is branched to.
    """

    def __init__(self, program: Program) -> None:
        self.instructions = program.instructions
        targets = (i.operands[-1] for i in program.instructions if i.name == "bra")
        self.leaders = {program.labels[target.name] for target in targets if isinstance(target, Name)}

    def __missing__(self, start: int) -> int:
        end = start
        while end < len(self.instructions) and not changes_counter(self.instructions[end]):
            end += 1
            if end in self.leaders:
                break
        self[start] = end
        return end


def narrowest_access(program: Program, space: str) -> int:
    """Return the bytes of the kernel's shortest access to a memory: no unit of it must be longer."""
    widths = [width for i in program.instructions for width in _access_widths(i, space)]
    return min(widths, default=4)


def _access_widths(instruction: Instruction, space: str) -> Iterator[int]:
    if instruction.name == "cp":  # cp.async
        if len(instruction.operands) > 2 and isinstance(size := instruction.operands[2], Immediate):
            yield size.value
    elif any(each.startswith(space) for each in instruction.modifiers) and instruction.name in (
        "ld",
        "st",
        "atom",
        "red",
    ):
        bits = int("".join(c for c in instruction.modifiers[-1] if c.isdigit()))
        yield min(16, bits // 8)
    elif space == "shared" and instruction.name in ("ldmatrix", "stmatrix"):
        yield 16

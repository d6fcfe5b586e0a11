"""Instructions as functions that a wave executes: `decode` for all that the manual describes for a single
thread, and here those that involve memory, other threads or the program counter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.ptx import tensor_core
from tools.ptx.arithmetic import DTYPES, Opcode, UnknownOpcodeError, operation
from tools.ptx.machine import AsyncCopy, BlockEnds, Code, Step, Wave, narrowest_access
from tools.ptx.memory import WARP, DivergenceError, RaceError
from tools.ptx.parser import Address, Immediate, Instruction, Name, Operand, Program, Register, Sink, Vector
from tools.ptx.rounding import Array

Read = Callable[[Wave], Array]
Write = Callable[[Wave, Array], None]
Decoder = Callable[[Instruction, Program], Step]
DECODERS: dict[str, Decoder] = {}


def decode(program: Program) -> Code:
    steps = [guarded(instruction, decode_one(instruction, program)) for instruction in program.instructions]
    widths = (narrowest_access(program, space) for space in ("shared", "global"))
    return Code(program, steps, BlockEnds(program), *widths)


def decode_one(instruction: Instruction, program: Program) -> Step:
    if instruction.name == "setp" and instruction.opcode.endswith("x2"):
        return compare_pairs(instruction)
    if instruction.name in DECODERS and not (instruction.name == "mov" and not has_vector(instruction)):
        return DECODERS[instruction.name](instruction, program)
    try:
        defined = operation(instruction.opcode)
    except UnknownOpcodeError as error:
        raise UnknownOpcodeError(f"{error}: {instruction}") from None
    target = writer(instruction.operands[0])
    sources = [reader(each, kind) for each, kind in zip(instruction.operands[1:], defined.operands, strict=True)]
    compute, dtype = defined.compute, DTYPES[defined.result]
    match sources:
        case [a]:
            return lambda wave: target(wave, compute(a(wave)).view(dtype))
        case [a, b]:
            return lambda wave: target(wave, compute(a(wave), b(wave)).view(dtype))
        case _:
            return lambda wave: target(wave, compute(*(each(wave) for each in sources)).view(dtype))


def guarded(instruction: Instruction, step: Step) -> Step:
    """Execute only in threads whose guard is true; a branch takes its guard as its condition."""
    if instruction.guard is None or instruction.name == "bra":
        return step
    predicate = guard(instruction)

    def run(wave: Wave) -> None:
        active = wave.active
        wave.narrow(active & predicate(wave))
        try:
            if len(wave.threads):
                step(wave)
        finally:
            wave.narrow(active)

    return run


def guard(instruction: Instruction) -> Read:
    assert instruction.guard
    index = instruction.guard.register.index
    if instruction.guard.negated:
        return lambda wave: ~wave.registers[index]
    return lambda wave: wave.registers[index]


# Operands


def reader(operand: Operand, kind: str) -> Read:
    """Return a function that reads an operand of all threads as a type of PTX."""
    dtype = DTYPES[kind]
    match operand:
        case Register(index, bits):
            if bits == 1 or 8 * dtype.itemsize == bits:
                return lambda wave: wave.registers[index].view(dtype)
            assert 8 * dtype.itemsize < bits, (operand, kind)
            low = np.dtype(f"u{dtype.itemsize}")
            return lambda wave: wave.registers[index].astype(low).view(dtype)
        case Immediate(value):
            return lambda wave: wave.constant(value, dtype)
        case Name(name):
            return lambda wave: wave.special[name].astype(f"u{dtype.itemsize}").view(dtype)
        case _:
            raise UnknownOpcodeError(f"an operand that is no register: {operand}")


def writer(operand: Operand) -> Write:
    """Return a function that sets a register from an element per thread."""
    match operand:
        case Register(index, bits):
            return lambda wave, value: wave.assign(index, bits, value)
        case Sink():
            return lambda wave, value: None
        case _:
            raise UnknownOpcodeError(f"a destination that is no register: {operand}")


def elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def has_vector(instruction: Instruction) -> bool:
    return any(isinstance(operand, Vector) for operand in instruction.operands)


def address_of(operand: Operand, kind: str) -> Read:
    """Return a function that computes the addresses of the active threads."""
    assert isinstance(operand, Address), operand
    base, dtype = reader(operand.base, kind), DTYPES[kind].type
    offset = dtype(operand.offset % 2 ** (8 * dtype().itemsize))
    return lambda wave: (base(wave) + offset)[wave.threads]


def decodes(
    *names: str,
) -> Callable[[Callable[[Instruction, Program], Step]], Callable[[Instruction, Program], Step]]:
    def register(decoder: Callable[[Instruction, Program], Step]) -> Callable[[Instruction, Program], Step]:
        DECODERS.update(dict.fromkeys(names, decoder))
        return decoder

    return register


def compare_pairs(instruction: Instruction) -> Step:
    """Compare both halves of packed operands: the lower ones set the first predicate."""
    compare = operation(instruction.opcode.removesuffix("x2")).compute
    low, high = (writer(each) for each in elements(instruction.operands[0]))
    a, b = (reader(each, "b32") for each in instruction.operands[1:])
    assert instruction.opcode.endswith("bf16x2"), instruction

    def run(wave: Wave) -> None:
        halves = [np.ascontiguousarray(each(wave)).view(np.uint16).reshape(-1, 2) for each in (a, b)]
        low(wave, compare(*(each[:, 0] for each in halves)))
        high(wave, compare(*(each[:, 1] for each in halves)))

    return run


# Program counter and barriers


@decodes("bra")
def branch(instruction: Instruction, program: Program) -> Step:
    target = instruction.operands[-1]
    assert isinstance(target, Name)
    index = program.labels[target.name]
    if instruction.guard is None:
        return lambda wave: wave.branch(wave.active, index)
    condition = guard(instruction)
    return lambda wave: wave.branch(condition(wave), index)


@decodes("ret", "exit")
def leave(instruction: Instruction, program: Program) -> Step:
    assert instruction.guard is None, instruction
    return Wave.leave


@decodes("bar", "barrier")
def barrier(instruction: Instruction, program: Program) -> Step:
    if instruction.opcode == "bar.warp.sync":
        members = reader(instruction.operands[0], "u32")

        def meet(wave: Wave) -> None:
            wave.assert_members(members(wave))
            wave.grid.clocks.warps_met(np.unique(wave.agent[wave.threads] // WARP))

        return meet
    number = instruction.operands[0]
    if len(instruction.operands) != 1 or not isinstance(number, Immediate):
        raise UnknownOpcodeError(f"a barrier of a part of the block: {instruction}")
    return lambda wave: wave.park(number.value)


@decodes("griddepcontrol")
def grid_dependency(instruction: Instruction, program: Program) -> Step:
    def wait(wave: Wave) -> None:
        wave.waited[wave.threads] = True

    def trigger(wave: Wave) -> None:
        wave.grid.early_triggers |= not wave.waited[wave.threads].all()

    return {"griddepcontrol.wait": wait, "griddepcontrol.launch_dependents": trigger}[instruction.opcode]


# Loads and stores


@decodes("ld")
def load(instruction: Instruction, program: Program) -> Step:
    opcode = Opcode(instruction.opcode)
    targets = elements(instruction.operands[0])
    dtype, count = DTYPES[opcode.type], len(targets)
    size = count * dtype.itemsize
    registers = [target if isinstance(target, Register) else None for target in targets]
    if "param" in opcode.modifiers:
        source, write = instruction.operands[1], writer(targets[0])
        assert isinstance(source, Address) and isinstance(source.base, Name) and not source.offset, instruction
        name = source.base.name
        return lambda wave: write(wave, wave.constant(wave.grid.parameters[name], dtype))
    is_global = "global" in opcode.modifiers
    address = address_of(instruction.operands[1], "u64" if is_global else "u32")
    if not is_global and not any(each.startswith("shared") for each in opcode.modifiers):
        raise UnknownOpcodeError(f"a load from neither global nor shared memory: {instruction}")

    def run(wave: Wave) -> None:
        threads = wave.threads
        if is_global:
            content = wave.load_global(wave.grid.memory.locate(address(wave), size), size, threads)
        else:
            index = wave.shared_index(address(wave), size, threads)
            content = wave.shared.load(index, size, wave.agent[threads])
        values = content.view(dtype)
        for i, register in enumerate(registers):
            if register:
                wave.assign_active(register.index, register.bits, np.ascontiguousarray(values[:, i]))

    return run


@decodes("st")
def store(instruction: Instruction, program: Program) -> Step:
    opcode = Opcode(instruction.opcode)
    sources = [reader(each, opcode.type) for each in elements(instruction.operands[1])]
    size = len(sources) * DTYPES[opcode.type].itemsize
    is_global = "global" in opcode.modifiers
    address = address_of(instruction.operands[0], "u64" if is_global else "u32")

    def run(wave: Wave) -> None:
        threads = wave.threads
        content = np.stack([source(wave)[threads] for source in sources], 1).view(np.uint8)
        if is_global:
            wave.check_waited(threads)
            wave.grid.memory.store(wave.grid.memory.locate(address(wave), size), content, wave.agent[threads])
        else:
            wave.shared.store(wave.shared_index(address(wave), size, threads), content, wave.agent[threads])

    return run


ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "min": lambda old, b: np.minimum(old, b),
    "max": lambda old, b: np.maximum(old, b),
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
}


@decodes("atom", "red")
def atomic(instruction: Instruction, program: Program) -> Step:
    """Read, modify and write; threads come in random order. Orders other than relaxed are those of the grid."""
    opcode = Opcode(instruction.opcode)
    order = opcode.take("relaxed", "acquire", "release", "acq_rel") or "relaxed"
    scope = opcode.take("cta", "cluster", "gpu", "sys") or "gpu"
    update = ATOMICS[opcode.take(*ATOMICS) or ""]
    if opcode.take("global") is None or opcode.modifiers:
        raise UnknownOpcodeError(f"an atomic that is not defined here: {instruction}")
    dtype = DTYPES[opcode.type]
    has_result = instruction.name == "atom"
    target = elements(instruction.operands[0])[0] if has_result else None
    address = address_of(instruction.operands[has_result], "u64")
    operands = [reader(each, opcode.type) for each in instruction.operands[has_result + 1 :]]
    is_grid_wide = scope in ("gpu", "sys")
    acquires, releases = (is_grid_wide and order in (each, "acq_rel") for each in ("acquire", "release"))

    def run(wave: Wave) -> None:
        memory, clocks, threads = wave.grid.memory, wave.grid.clocks, wave.threads
        wave.check_waited(threads)
        index = memory.locate(address(wave), dtype.itemsize)
        units = memory.units(index, dtype.itemsize)
        memory.check_content(units)
        words = memory.bytes.view(dtype)
        place = index // dtype.itemsize
        values = [source(wave)[threads] for source in operands]
        old = np.empty(len(threads), dtype)
        for i in wave.grid.random.permutation(len(threads)).tolist():
            counter, block = int(index[i]), int(wave.blocks[wave.slot[threads[i]]])
            if acquires:
                clocks.acquire(block, counter)
            one = slice(i, i + 1)
            memory.note_write(
                units[one], wave.agent[threads[one]], index[one], None, atomic=is_grid_wide, published=releases
            )
            if releases:
                clocks.release(block, counter)
            old[i] = words[place[i]]
            words[place[i]] = update(old[i], *(value[i] for value in values))
        if isinstance(target, Register):
            wave.assign_active(target.index, target.bits, old)

    return run


@decodes("prefetch", "prefetchu", "applypriority", "discard")
def hint(instruction: Instruction, program: Program) -> Step:
    return lambda wave: None


@decodes("createpolicy")
def cache_policy(instruction: Instruction, program: Program) -> Step:
    write = writer(instruction.operands[0])
    return lambda wave: write(wave, wave.constant(0, DTYPES["b64"]))


@decodes("fence", "membar")
def fence(instruction: Instruction, program: Program) -> Step:
    raise UnknownOpcodeError(f"fences are not modelled: {instruction}")


@decodes("cp")
def asynchronous_copy(instruction: Instruction, program: Program) -> Step:
    if instruction.opcode == "cp.async.commit_group":

        def commit(wave: Wave) -> None:
            wave.groups[wave.threads] += 1

        return commit
    if instruction.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        pending = instruction.operands[0].value if instruction.operands else 0  # pyright: ignore
        if instruction.opcode == "cp.async.wait_all":
            return lambda wave: wave.complete_copies(-1)  # of the open group too
        return lambda wave: wave.complete_copies(pending)
    if not instruction.opcode.startswith(("cp.async.ca.shared.global", "cp.async.cg.shared.global")):
        raise UnknownOpcodeError(f"the opcode {instruction.opcode} has no definition: {instruction}")
    target, source = (
        address_of(each, kind) for each, kind in zip(instruction.operands, ("u32", "u64"), strict=False)
    )
    cp_size = instruction.operands[2]
    assert isinstance(cp_size, Immediate)
    size = cp_size.value
    has_policy = instruction.opcode.endswith("cache_hint")
    has_valid = len(instruction.operands) - has_policy > 3
    valid = reader(instruction.operands[3], "u32") if has_valid else None

    def start(wave: Wave) -> None:
        threads, memory = wave.threads, wave.grid.memory
        length = valid(wave)[threads].astype(np.int64) if valid else np.full(len(threads), size)
        from_address = source(wave)
        index = np.zeros(len(threads), np.int64)
        for count in np.unique(length).tolist():
            if count:
                index[length == count] = memory.locate(from_address[length == count], count)
        to = wave.shared_index(target(wave), size, threads)
        units = wave.shared.units(to, size)
        if wave.shared.in_flight[units].any():
            raise RaceError("overwrites what an unfinished cp.async will write")
        agents = np.broadcast_to(wave.agent[threads][:, None], units.shape)
        wave.shared.check_order(wave.shared.writer, wave.shared.write_time, units, agents, "written", "copies to")
        wave.shared.check_order(wave.shared.reader, wave.shared.read_time, units, agents, "read", "copies to")
        wave.shared.in_flight[units] = True
        wave.shared.written[units] = True
        wave.copies.append(AsyncCopy(threads, to, index, size, length, wave.groups[threads]))

    return start


# Between the threads of a warp


@decodes("shfl")
def shuffle(instruction: Instruction, program: Program) -> Step:
    """Read a register of another thread of the warp. c: a mask of segments (bits 8 to 12) and a limit."""
    mode = instruction.opcode.split(".")[2]
    destination = elements(instruction.operands[0])
    write = writer(destination[0])
    write_valid = writer(destination[1]) if len(destination) > 1 else None
    a, b, c, members = (reader(each, "u32") for each in instruction.operands[1:])

    def run(wave: Wave) -> None:
        wave.assert_members(members(wave))
        lane = wave.thread % WARP
        by, limit = (b(wave) & np.uint32(31)).astype(np.int64), (c(wave) & np.uint32(31)).astype(np.int64)
        segment = (c(wave) >> np.uint32(8) & np.uint32(31)).astype(np.int64)
        highest = (lane & segment) | (limit & ~segment)
        match mode:
            case "up":
                other = lane - by
                valid = other >= highest
            case "down":
                other = lane + by
                valid = other <= highest
            case "bfly":
                other = lane ^ by
                valid = other <= highest
            case _:
                other = (lane & segment) | (by & ~segment)
                valid = other <= highest
        chosen = np.arange(len(lane)) - lane + np.where(valid, other, lane)
        if not wave.full and not wave.active[chosen[wave.threads]].all():
            raise DivergenceError("reads a register of a thread that does not take part")
        write(wave, a(wave)[chosen])
        if write_valid:
            write_valid(wave, valid)

    return run


@decodes("redux")
def reduce(instruction: Instruction, program: Program) -> Step:
    _, _, name, kind = instruction.opcode.split(".")
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum} | {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    write = writer(instruction.operands[0])
    a, members = reader(instruction.operands[1], kind), reader(instruction.operands[2], "u32")

    def run(wave: Wave) -> None:
        mask = members(wave)
        wave.assert_members(mask)
        if (mask[wave.threads] != 2**32 - 1).any():
            raise UnknownOpcodeError(f"a reduction of a part of a warp: {instruction}")
        by_warp = combine[name].reduce(a(wave).reshape(-1, WARP), axis=1, dtype=DTYPES[kind])
        write(wave, np.repeat(by_warp, WARP))

    return run


@decodes("vote")
def vote(instruction: Instruction, program: Program) -> Step:
    mode = instruction.opcode.split(".")[2]
    write, a = writer(instruction.operands[0]), reader(instruction.operands[1], "pred")
    members = reader(instruction.operands[2], "u32")

    def run(wave: Wave) -> None:
        wave.assert_members(members(wave))
        votes = (a(wave) & wave.active).reshape(-1, WARP)
        match mode:
            case "ballot":
                bits = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
                write(wave, np.repeat((votes * bits).sum(1, dtype=np.uint64).astype(np.uint32), WARP))
            case "any":
                write(wave, np.repeat(votes.any(1), WARP))
            case "all":
                write(wave, np.repeat((votes | ~wave.active.reshape(-1, WARP)).all(1), WARP))
            case _:
                raise UnknownOpcodeError(f"a vote that is not defined: {instruction}")

    return run


def matrix_row_places(wave: Wave, addresses: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the warps, and for each row of their `count` matrices the thread with its address, and its place."""
    warps = wave.whole_warps()
    rows = addresses.reshape(len(warps), WARP)[:, : 8 * count].ravel()
    threads = wave.threads.reshape(len(warps), WARP)[:, : 8 * count].ravel()
    return warps, threads, wave.shared_index(rows, 16, threads)


@decodes("ldmatrix")
def load_matrix(instruction: Instruction, program: Program) -> Step:
    """Load 8 x 8 matrices of 16-bit numbers: threads 8 i to 8 i + 7 have the addresses of the rows of matrix i."""
    registers = elements(instruction.operands[0])
    count, transposed = len(registers), "trans" in instruction.modifiers
    assert ".m8n8." in instruction.opcode and instruction.opcode.endswith("b16"), instruction
    address = address_of(instruction.operands[1], "u32")

    def run(wave: Wave) -> None:
        warps, threads, index = matrix_row_places(wave, address(wave), count)
        content = wave.shared.load(index, 16, wave.agent[threads]).view(np.uint16)
        fragments = tensor_core.matrix_fragments(content.reshape(len(warps), count, 8, 8), transposed)
        for i, register in enumerate(registers):
            if isinstance(register, Register):
                wave.assign_active(register.index, register.bits, fragments[:, i].ravel())

    return run


@decodes("stmatrix")
def store_matrix(instruction: Instruction, program: Program) -> Step:
    """Store 8 x 8 matrices, as ldmatrix loads them."""
    sources = [reader(each, "b32") for each in elements(instruction.operands[1])]
    count, transposed = len(sources), "trans" in instruction.modifiers
    assert ".m8n8." in instruction.opcode and instruction.opcode.endswith("b16"), instruction
    address = address_of(instruction.operands[0], "u32")

    def run(wave: Wave) -> None:
        warps, threads, index = matrix_row_places(wave, address(wave), count)
        fragments = np.stack([source(wave).reshape(-1, WARP)[warps] for source in sources], 1)
        rows = tensor_core.matrix_rows(fragments, transposed)
        wave.shared.store(index, rows.reshape(-1, 8).view(np.uint8), wave.agent[threads])

    return run


@decodes("mma")
def multiply_matrices(instruction: Instruction, program: Program) -> Step:
    shape = tensor_core.mma_shape(instruction.opcode)
    targets = elements(instruction.operands[0])
    a, b, c = ([reader(each, "b32") for each in elements(operand)] for operand in instruction.operands[1:])

    def run(wave: Wave) -> None:
        warps = wave.whole_warps()

        def gather(sources: list[Read]) -> Array:
            return np.stack([source(wave).reshape(-1, WARP)[warps] for source in sources], 2)

        result = tensor_core.multiply(shape, gather(a), gather(b), gather(c))
        for i, register in enumerate(targets):
            assert isinstance(register, Register)
            wave.assign_active(register.index, register.bits, np.ascontiguousarray(result[:, :, i]).ravel())

    return run


# Registers in parts


@decodes("mov")
def pack_or_unpack(instruction: Instruction, program: Program) -> Step:
    """Move a register to several of its parts, lowest first, or several to one."""
    target, source = instruction.operands
    whole = DTYPES[Opcode(instruction.opcode).type]
    if isinstance(target, Vector):
        read = reader(source, f"b{8 * whole.itemsize}")
        parts = [writer(each) for each in target.elements]
        part = np.dtype(f"u{whole.itemsize // len(parts)}")

        def unpack(wave: Wave) -> None:
            columns = np.ascontiguousarray(read(wave)).view(part).reshape(-1, len(parts))
            for i, write in enumerate(parts):
                write(wave, np.ascontiguousarray(columns[:, i]))

        return unpack
    assert isinstance(source, Vector)
    kind = f"b{8 * whole.itemsize // len(source.elements)}"
    reads, write = [reader(each, kind) for each in source.elements], writer(target)
    return lambda wave: write(wave, np.stack([read(wave) for read in reads], 1).view(whole).ravel())

"""PTX text to a `Program`: the one kernel of a module that Triton has emitted, as a list of instructions.

    @%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd3 + 16 ];
    guard  opcode          operands

Grammar: PTX ISA, chapter 4. Registers are numbered across the kernel; a name that is declared in the braces of
inline assembly gets a register of its own. `.loc` directives become the source line of the instructions that
follow.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property

REGISTER_BITS = {"pred": 1} | {f"{kind}{bits}": bits for bits in (8, 16, 32, 64) for kind in "busf"}
STATEMENT = re.compile(
    r"""\s*(?:
        (?P<location>\.loc\b[^\n]*)
      | (?P<label>[\w$]+):
      | (?P<brace>[{}])
      | (?P<statement>[^;]+);
    )""",
    re.VERBOSE,
)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
PARAMETER = re.compile(r"\.param\s+\.(\w+)(?:\s+\.ptr\b[^,)]*?|\s+\.align\s+\d+)*\s+(\w+)\s*[,)]")


class PtxSyntaxError(Exception):
    pass


@dataclass(frozen=True)
class Register:
    index: int
    bits: int  # 1: a predicate


@dataclass(frozen=True)
class Immediate:
    """A constant as its bits: -1, 0x7F and 0f3F800000, which is 1.0, are integers."""

    value: int


@dataclass(frozen=True)
class Name:
    """A special register such as %tid.x, a label, a parameter or an array in shared memory."""

    name: str


@dataclass(frozen=True)
class Address:
    base: "Register | Immediate | Name"
    offset: int


@dataclass(frozen=True)
class Vector:
    elements: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Sink:
    """The destination `_`, which discards a result."""


Operand = Register | Immediate | Name | Address | Vector | Sink


@dataclass(frozen=True)
class Guard:
    """A thread executes the instruction only where the predicate is true, or false if negated."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str
    source: str  # file:line of the kernel's Python code

    @cached_property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        return f"`{self.text}` ({self.source})"


@dataclass
class Program:
    name: str
    threads: int  # per block
    parameters: dict[str, int] = field(default_factory=dict)  # bits by name, in order
    register_bits: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # index of the instruction that follows

    @cached_property
    def written_parameters(self) -> frozenset[str]:
        """Parameters that an address of a store or atomic may be computed from, ignoring the order of
        instructions.
        """
        sources: dict[int, list[Operand]] = {}  # operands that a register is computed from
        queue: list[Operand] = []
        for instruction in self.instructions:
            for target in _registers(instruction.operands[0]) if instruction.operands else ():
                sources.setdefault(target.index, []).extend(instruction.operands[1:])
            if instruction.name in ("st", "atom", "red"):
                queue += [operand for operand in instruction.operands if isinstance(operand, Address)]
        written = set[str]()
        while queue:
            operand = queue.pop()
            base = operand.base if isinstance(operand, Address) else operand
            if isinstance(base, Name):
                written |= {base.name} & self.parameters.keys()
            for register in _registers(operand):
                queue += sources.pop(register.index, ())
        return frozenset(written)


def _registers(operand: Operand) -> list[Register]:
    match operand:
        case Register():
            return [operand]
        case Address(Register() as base, _):
            return [base]
        case Vector(elements):
            return [register for element in elements for register in _registers(element)]
        case _:
            return []


def parse(ptx: str) -> Program:
    """Parse the only entry of a module."""
    header, _, rest = ptx.partition(".entry ")[2].partition("\n{")
    name = header.partition("(")[0].strip()
    threads = re.search(r"\.reqntid\s+(\d+)", header)
    if not name or not threads:
        raise PtxSyntaxError("the text has no kernel with a fixed number of threads per block (.reqntid)")
    program = Program(name, int(threads[1]))
    program.parameters = {match[2]: REGISTER_BITS[match[1]] for match in PARAMETER.finditer(header)}
    _Body(program).parse(_without_comments(rest[: _end_of_body(rest)]))
    return program


def _end_of_body(text: str) -> int:
    """Return the position of the brace that closes the kernel."""
    depth = 1
    for brace in re.finditer(r"//[^\n]*|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    raise PtxSyntaxError("a brace is not closed")


def _without_comments(text: str) -> str:
    """Remove comments, except the one after `.loc`, which names the file."""
    lines = (line if ".loc" in line else line.partition("//")[0] for line in text.splitlines())
    return "\n".join(lines)


class _Body:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, Register]] = [{}]
        self.source = "unknown line"

    def parse(self, text: str) -> None:
        position = 0
        while match := STATEMENT.match(text, position):
            position = match.end()
            if match["location"]:
                self.source = match["location"].partition("//")[2].strip().partition(" ")[0] or self.source
            elif match["label"]:
                self.program.labels[match["label"]] = len(self.program.instructions)
            elif match["brace"] == "{":
                self.scopes.append({})
            elif match["brace"] == "}":
                self.scopes.pop()
            elif match["statement"].lstrip().startswith(".reg"):
                self.declare(match["statement"])
            elif not match["statement"].lstrip().startswith(".pragma"):
                self.program.instructions.append(self.instruction(" ".join(match["statement"].split())))
        if rest := text[position:].strip():
            raise PtxSyntaxError(f"not a statement: {rest[:80]}")

    def declare(self, statement: str) -> None:
        """Declare `.reg .b32 %r<11>`, which is %r0 to %r10, or `.reg .b32 t, one`."""
        kind, names = re.match(r"\s*\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
        for name in (part.strip() for part in names.split(",")):
            stem, _, count = name.rstrip(">").partition("<")
            for each in [f"{stem}{i}" for i in range(int(count))] if count else [name]:
                bits = REGISTER_BITS[kind]
                self.scopes[-1][each] = Register(len(self.program.register_bits), bits)
                self.program.register_bits.append(bits)

    def instruction(self, text: str) -> Instruction:
        guard, rest = None, text
        if text.startswith("@"):
            predicate, _, rest = text[1:].partition(" ")
            register = self.operand(predicate.lstrip("!"))
            if not isinstance(register, Register):
                raise PtxSyntaxError(f"the guard is not a register: {text}")
            guard = Guard(register, predicate.startswith("!"))
        opcode, _, operands = rest.strip().partition(" ")
        parsed = tuple(self.operand(each.strip()) for each in OPERAND.findall(operands))
        return Instruction(opcode, parsed, guard, text, self.source)

    def operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self.operand(each.strip()) for each in text[1:-1].split(",")))
        if text[0] == "[":
            base, sign, offset = re.match(r"([^+]+?)\s*(?:([+])\s*(-?\w+))?$", text[1:-1].strip()).groups()  # pyright: ignore[reportOptionalMemberAccess]
            inner = self.operand(base.strip())
            assert isinstance(inner, Register | Immediate | Name), text
            return Address(inner, int(offset, 0) if sign else 0)
        if text == "_":
            return Sink()
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if "|" in text:
            return Vector(tuple(self.operand(each.strip()) for each in text.split("|")))
        return Name(text)

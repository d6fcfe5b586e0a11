"""Opcodes that compute registers from registers, each thread for itself: PTX ISA, "Integer", "Floating-Point",
"Comparison and Selection", "Logic and Shift" and "Data Movement" instructions.

`operation("add.s32")` returns the types of operands and result, and a function on NumPy arrays with an element per
thread. The functions below are the definitions of the manual, one per name of an instruction; a modifier that a
definition does not know is an error, so that none is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from tools.ptx import rounding
from tools.ptx.rounding import Array, canonical, flush, from_bfloat16, saturate, to_bfloat16, to_float32

DTYPES: dict[str, Any] = (
    {f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)}
    | {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
    | {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
    | {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}  # as bits
)
ROUNDING = {"rn", "rz", "rm", "rp"}
Compute = Callable[..., Array]


class UnknownOpcodeError(Exception):
    pass


@dataclass(frozen=True)
class Operation:
    result: str  # types, as PTX names them
    operands: tuple[str, ...]
    compute: Compute


class Opcode:
    """An opcode as its name, its types and its other modifiers; `take` returns and removes a modifier."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name, *modifiers = text.split(".")
        self.types = [each for each in modifiers if each in DTYPES]
        self.modifiers = [each for each in modifiers if each not in DTYPES]

    @property
    def type(self) -> str:
        return self.types[-1]

    @property
    def is_float(self) -> bool:
        return self.type in ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2")

    def take(self, *names: str) -> str | None:
        return next((self.modifiers.pop(i) for i, each in enumerate(self.modifiers) if each in names), None)


DEFINITIONS: dict[str, Callable[[Opcode], Operation]] = {}


def defines(*names: str) -> Callable[[Callable[[Opcode], Operation]], Callable[[Opcode], Operation]]:
    def register(definition: Callable[[Opcode], Operation]) -> Callable[[Opcode], Operation]:
        DEFINITIONS.update(dict.fromkeys(names, definition))
        return definition

    return register


@cache
def operation(text: str) -> Operation:
    opcode = Opcode(text)
    if opcode.name not in DEFINITIONS:
        raise UnknownOpcodeError(f"the opcode {text} has no definition")
    defined = DEFINITIONS[opcode.name](opcode)
    if opcode.modifiers:
        raise UnknownOpcodeError(f"the opcode {text} has a modifier without definition: {opcode.modifiers}")
    return defined


def same_type(opcode: Opcode, count: int, compute: Compute) -> Operation:
    """Return an operation whose operands and result have the opcode's type; floats with .ftz and .sat."""
    kind = opcode.type
    flushes, saturates = opcode.take("ftz"), opcode.take("sat")
    if kind in ("f16x2", "bf16x2"):
        compute = packed(kind, per_type(kind.removesuffix("x2"), compute))
    elif opcode.is_float:
        compute = per_type(kind, compute)
    if flushes:
        compute = flushed(compute)
    if saturates:
        assert kind in ("f32", "f64"), opcode.text
        compute = partial(_saturated, compute)
    return Operation(kind, (kind,) * count, compute)


def per_type(kind: str, compute: Compute) -> Compute:
    """Compute in float32 for the 16-bit types, where one operation on two of them is exact enough to be rounded
    again (its 24 bits are at least 2 * 11 + 2), and return canonical NaN.
    """
    if kind == "bf16":
        return lambda *x: to_bfloat16(compute(*(from_bfloat16(each) for each in x)))
    if kind == "f16":
        return lambda *x: compute(*(each.astype(np.float32) for each in x)).astype(np.float16)
    if kind == "f32":
        return lambda *x: canonical(compute(*x))
    return compute


def packed(kind: str, compute: Compute) -> Compute:
    """Apply a function of 16-bit values to both halves of f16x2 or bf16x2."""
    half = DTYPES[kind.removesuffix("x2")]

    def both(*x: Array) -> Array:
        low = compute(*((each & np.uint32(0xFFFF)).astype(np.uint16).view(half) for each in x)).view(np.uint16)
        high = compute(*((each >> np.uint32(16)).astype(np.uint16).view(half) for each in x)).view(np.uint16)
        return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

    return both


def flushed(compute: Compute) -> Compute:
    return lambda *x: flush(compute(*(flush(each) for each in x)))


def _saturated(compute: Compute, *x: Array) -> Array:
    return saturate(compute(*x))


# Integers and floating-point numbers


@defines("add", "sub")
def add_or_subtract(opcode: Opcode) -> Operation:
    mode = opcode.take(*ROUNDING) or "rn"
    sign = 1 if opcode.name == "add" else -1
    if mode != "rn":
        assert opcode.type == "f32", opcode.text
        return same_type(
            opcode,
            2,
            lambda a, b: rounding.add_to_float32(a.astype(np.float64), sign * b.astype(np.float64), mode),
        )
    if opcode.type == "s32" and opcode.take("sat"):
        wide = np.add if sign == 1 else np.subtract
        return Operation("s32", ("s32", "s32"), lambda a, b: _clamp(wide(a.astype(np.int64), b), np.int32))
    return same_type(opcode, 2, np.add if sign == 1 else np.subtract)


def _clamp(x: Array, dtype: type[np.integer[Any]]) -> Array:
    return np.clip(x, np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)


@defines("mul")
def multiply(opcode: Opcode) -> Operation:
    if opcode.is_float:
        mode = opcode.take(*ROUNDING) or "rn"
        if mode != "rn":
            assert opcode.type == "f32", opcode.text
            return same_type(opcode, 2, lambda a, b: to_float32(a.astype(np.float64) * b.astype(np.float64), mode))
        return same_type(opcode, 2, np.multiply)
    half, kind = opcode.take("lo", "hi", "wide"), opcode.type
    assert half, opcode.text
    if half == "wide":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return Operation(wide, (kind, kind), lambda a, b: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide]))
    return same_type(opcode, 2, np.multiply if half == "lo" else high_half)


def high_half(a: Array, b: Array) -> Array:
    """Return the upper half of the bits of a product."""
    bits, dtype = 8 * a.dtype.itemsize, a.dtype
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(dtype)
    exact = [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(a, b, strict=True)]
    return np.array(exact, np.uint64).view(dtype)


@defines("mad")
def multiply_add(opcode: Opcode) -> Operation:
    assert not opcode.is_float, opcode.text
    product = operation(f"mul.{opcode.take('lo', 'hi', 'wide')}.{opcode.type}")
    return Operation(
        product.result, (*product.operands, product.result), lambda a, b, c: product.compute(a, b) + c
    )


@defines("fma")
def fused_multiply_add(opcode: Opcode) -> Operation:
    mode, kind = opcode.take(*ROUNDING) or "rn", opcode.type
    flushes, saturates = opcode.take("ftz"), opcode.take("sat")
    if kind == "f32":
        compute: Compute = partial(rounding.fma_float32, mode=mode)
    elif kind == "f64":
        compute = rounding.fma_float64
    elif kind in ("bf16", "bf16x2"):
        compute = rounding.fma_bfloat16
    else:
        compute = _fma_float16
    assert kind == "f32" or (mode == "rn" and not flushes and not saturates), opcode.text
    if kind.endswith("x2"):
        compute = packed(kind, compute)
    if flushes:
        compute = flushed(compute)
    if saturates:
        compute = partial(_saturated, compute)
    return Operation(kind, (kind,) * 3, compute)


def _fma_float16(a: Array, b: Array, c: Array) -> Array:
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    return rounding.sum_to_odd(a * b, c).astype(np.float16)


@defines("neg", "abs")
def sign(opcode: Opcode) -> Operation:
    """Change the sign; of floats the sign bit, which NaN keep."""
    kind, negates = opcode.type, opcode.name == "neg"
    if not opcode.is_float:
        return same_type(opcode, 1, np.negative if negates else np.abs)
    if kind not in ("bf16", "f16x2", "bf16x2"):
        change: Compute = np.negative if negates else np.abs
        return Operation(kind, (kind,), flushed(change) if opcode.take("ftz") else change)
    mask = DTYPES[kind].type({"bf16": 0x8000}.get(kind, 0x80008000))
    return Operation(kind, (kind,), lambda a: a ^ mask if negates else a & ~mask)


@defines("min", "max")
def minimum_or_maximum(opcode: Opcode) -> Operation:
    """Return the smaller or larger; of NaN and a number the number, or with .NaN NaN. +0 is larger than -0."""
    largest = opcode.name == "max"
    if not opcode.is_float:
        return same_type(opcode, 2, np.maximum if largest else np.minimum)
    propagates = opcode.take("NaN")

    def select(a: Array, b: Array) -> Array:
        if propagates:
            chosen = np.maximum(a, b) if largest else np.minimum(a, b)
        else:
            chosen = np.fmax(a, b) if largest else np.fmin(a, b)
        zeros = (a == 0) & (b == 0)
        if zeros.any():
            negative = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
            chosen = np.where(zeros, np.copysign(chosen.dtype.type(0), np.where(negative, -1, 1)), chosen)
        return chosen.astype(a.dtype)

    return same_type(opcode, 2, select)


@defines("div")
def divide(opcode: Opcode) -> Operation:
    """Divide: integers toward zero, floats rounded to nearest, also where PTX allows an error of 2 ulp."""
    if not opcode.is_float:
        return same_type(opcode, 2, lambda a, b: _integer_division(a, b)[0])
    opcode.take("rn", "full", "approx")
    return same_type(opcode, 2, np.divide)


@defines("rem")
def remainder(opcode: Opcode) -> Operation:
    return same_type(opcode, 2, lambda a, b: _integer_division(a, b)[1])


def _integer_division(a: Array, b: Array) -> tuple[Array, Array]:
    """Return quotient and remainder. Results of a division by zero are unspecified: all bits are set."""
    ones = np.array(-1).astype(a.dtype)
    divisor = np.where(b == 0, ones.dtype.type(1), b)
    rest = np.fmod(a, divisor)
    return np.where(b == 0, ones, (a - rest) // divisor), np.where(b == 0, ones, rest)


def approximation(function: Compute) -> Callable[[Opcode], Operation]:
    """Return the definition of a function that PTX approximates in float32: here rounded to nearest."""

    def definition(opcode: Opcode) -> Operation:
        opcode.take("approx", "rn")
        if opcode.type == "f64":
            return same_type(opcode, 1, function)
        return same_type(opcode, 1, lambda x: function(x.astype(np.float64)).astype(np.float32))

    return definition


DEFINITIONS |= {
    "rcp": approximation(lambda x: 1 / x),
    "sqrt": approximation(np.sqrt),
    "rsqrt": approximation(lambda x: 1 / np.sqrt(x)),
    "ex2": approximation(np.exp2),
    "lg2": approximation(np.log2),
    "sin": approximation(np.sin),
    "cos": approximation(np.cos),
    "tanh": approximation(np.tanh),
}


@defines("copysign")
def copy_sign(opcode: Opcode) -> Operation:
    return Operation(opcode.type, (opcode.type,) * 2, lambda a, b: np.copysign(b, a))


# Comparison and selection

ORDERED: dict[str, Compute] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}  # as unsigned integers
COMBINE: dict[str, Compute] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@defines("setp")
def set_predicate(opcode: Opcode) -> Operation:
    """Compare: floats are ordered unless a comparison ends in u, which is true if either is NaN."""
    comparison = opcode.take(*ORDERED, *UNSIGNED, *(f"{each}u" for each in ORDERED), "num", "nan")
    combine, kind, flushes = opcode.take(*COMBINE), opcode.type, opcode.take("ftz")
    assert comparison, opcode.text
    if comparison in ("num", "nan"):
        compare: Compute = lambda a, b: (np.isnan(a) | np.isnan(b)) == (comparison == "nan")  # noqa: E731
    elif comparison in ORDERED or comparison in UNSIGNED:
        ordered = ORDERED[UNSIGNED.get(comparison, comparison)]
        is_float_ne = opcode.is_float and comparison == "ne"  # NumPy's is true for NaN
        compare = (lambda a, b: (a < b) | (a > b)) if is_float_ne else ordered
    else:
        compare = lambda a, b: ORDERED[comparison[:-1]](a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    operands, compute = (kind, kind), compare
    if kind in ("bf16", "f16"):
        convert = from_bfloat16 if kind == "bf16" else np.asarray
        compute = lambda a, b: compare(convert(a), convert(b))  # noqa: E731
    if flushes:
        unflushed = compute
        compute = lambda a, b: unflushed(flush(a), flush(b))  # noqa: E731
    if combine:
        return Operation("pred", (*operands, "pred"), lambda a, b, c: COMBINE[combine](compute(a, b), c))
    return Operation("pred", operands, compute)


@defines("selp")
def select(opcode: Opcode) -> Operation:
    return Operation(opcode.type, (opcode.type, opcode.type, "pred"), lambda a, b, p: np.where(p, a, b))


# Logic and shifts


@defines("and", "or", "xor")
def logic(opcode: Opcode) -> Operation:
    bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[opcode.name]
    return Operation(opcode.type, (opcode.type,) * 2, bitwise)


@defines("not")
def invert(opcode: Opcode) -> Operation:
    return Operation(opcode.type, (opcode.type,), np.invert)


@defines("lop3")
def logic_of_three(opcode: Opcode) -> Operation:
    """Apply the function whose table is the last operand: bit 4a + 2b + c of it is the result for bits a, b, c."""

    def compute(a: Array, b: Array, c: Array, table: Array) -> Array:
        result = np.zeros_like(a)
        for i in range(8):
            terms = (x if i >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0)))
            matches = np.bitwise_and.reduce(list(terms))
            result |= np.where(table >> np.uint32(i) & np.uint32(1), matches, np.uint32(0))
        return result

    return Operation("b32", ("b32",) * 4, compute)


@defines("shl", "shr")
def shift(opcode: Opcode) -> Operation:
    """Shift; an amount (unsigned, 32 bits) beyond the width counts as the width. shr of s copies the sign."""
    kind, left = opcode.type, opcode.name == "shl"
    dtype = DTYPES[kind]
    width = 8 * dtype.itemsize

    def compute(a: Array, amount: Array) -> Array:
        within = np.minimum(amount, np.uint32(width - 1)).astype(dtype)
        if left:
            return np.where(amount < width, a << within, dtype.type(0))
        return a >> within if kind[0] == "s" else np.where(amount < width, a >> within, dtype.type(0))

    return Operation(kind, (kind, "u32"), compute)


@defines("shf")
def funnel_shift(opcode: Opcode) -> Operation:
    """Shift the 64 bits [b, a]; l returns the upper half, r the lower one. Amounts are taken modulo 32, or
    clamped.
    """
    left, wraps = opcode.take("l", "r") == "l", opcode.take("wrap", "clamp") == "wrap"

    def compute(a: Array, b: Array, amount: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a
        by = (amount & np.uint32(31) if wraps else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return Operation("b32", ("b32", "b32", "u32"), compute)


@defines("bfe")
def bit_field_extract(opcode: Opcode) -> Operation:
    """Return `length` bits of a from bit `start`, filled with zeros or, of s, with the field's sign.

    Bits beyond the width of a are copies of its sign (s) or zeros (u); start and length are their lowest 8 bits.
    """
    kind = opcode.type
    dtype = DTYPES[kind]
    width = 8 * dtype.itemsize

    def compute(a: Array, start: Array, length: Array) -> Array:
        start, length = (x & np.uint32(0xFF) for x in (start, length))
        unsigned = np.dtype(f"u{dtype.itemsize}")
        shifted = operation(f"shr.{kind}").compute(a, start).view(unsigned)
        keep = np.minimum(length, np.uint32(width)).astype(unsigned)
        ones = unsigned.type(2**width - 1)
        mask = np.where(keep < width, ~(ones << np.minimum(keep, unsigned.type(width - 1))), ones)
        field = shifted & mask
        if kind[0] == "s":
            last = np.minimum(start + np.maximum(length, np.uint32(1)) - np.uint32(1), np.uint32(width - 1))
            negative = (a >> last.astype(dtype)) & dtype.type(1) == 1
            field = np.where(negative & (length > 0), field | ~mask, field)
        return field.view(dtype)

    return Operation(kind, (kind, "u32", "u32"), compute)


@defines("bfi")
def bit_field_insert(opcode: Opcode) -> Operation:
    """Return b with `length` bits from bit `start` replaced by the lowest bits of a."""
    kind = opcode.type
    dtype = DTYPES[kind]
    width = 8 * dtype.itemsize

    def compute(a: Array, b: Array, start: Array, length: Array) -> Array:
        start, length = (x & np.uint32(0xFF) for x in (start, length))
        shift_left = operation(f"shl.b{width}").compute
        ones = np.full_like(a, 2**width - 1)
        mask = shift_left(~shift_left(ones, length), start)
        return (b & ~mask) | (shift_left(a, start) & mask)

    return Operation(kind, (kind, kind, "u32", "u32"), compute)


@defines("prmt")
def permute(opcode: Opcode) -> Operation:
    """Select four of the eight bytes of {b, a}: each of four digits of the selector names a byte, and its highest
    bit replicates that byte's sign bit.
    """

    def compute(a: Array, b: Array, selector: Array) -> Array:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros_like(a)
        for i in range(4):
            digit = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
            byte = (both >> ((digit & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(digit & 8, np.where(byte & np.uint64(0x80), 0xFF, 0), byte).astype(np.uint32)
            result |= byte << np.uint32(8 * i)
        return result

    return Operation("b32", ("b32",) * 3, compute)


@defines("popc")
def population_count(opcode: Opcode) -> Operation:
    return Operation("u32", (opcode.type,), lambda a: np.bitwise_count(a).astype(np.uint32))


@defines("clz")
def count_leading_zeros(opcode: Opcode) -> Operation:
    width = 8 * DTYPES[opcode.type].itemsize
    return Operation(
        "u32", (opcode.type,), lambda a: np.array([width - int(x).bit_length() for x in a], np.uint32)
    )


@defines("brev")
def reverse_bits(opcode: Opcode) -> Operation:
    width = 8 * DTYPES[opcode.type].itemsize
    return Operation(
        opcode.type,
        (opcode.type,),
        lambda a: np.array([int(f"{int(x):0{width}b}"[::-1], 2) for x in a], DTYPES[opcode.type]),
    )


# Data movement and conversion


@defines("mov")
def move(opcode: Opcode) -> Operation:
    return Operation(opcode.type, (opcode.type,), lambda a: a)


@defines("cvt")
def convert(opcode: Opcode) -> Operation:
    """Convert. Floats to integers are rounded by rzi, rni, rmi or rpi and clamped; rni and its like from float
    to the same float round to an integer.
    """
    target, source = opcode.types[0], opcode.types[-1]
    to_integer = opcode.take("rzi", "rni", "rmi", "rpi")
    mode, flushes, saturates = opcode.take(*ROUNDING) or "rn", opcode.take("ftz"), opcode.take("sat")
    floats = ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2")
    if target in ("bf16x2", "f16x2"):
        assert source == "f32" and not flushes and not saturates, opcode.text
        narrow = partial(to_bfloat16, mode=mode) if target == "bf16x2" else _to_half_bits
        return Operation(
            target, ("f32", "f32"), lambda a, b: narrow(a).astype(np.uint32) << np.uint32(16) | narrow(b)
        )
    if target in floats and source in floats:
        compute = partial(_float_to_float, target, source, mode, to_integer)
    elif target in floats:
        compute = partial(_integer_to_float, target, mode)
    elif source in floats:
        assert to_integer, opcode.text
        compute = partial(_float_to_integer, target, source, to_integer)
    else:
        clamp = DTYPES[target].type
        compute = (lambda a: _clamp(a, clamp)) if saturates else (lambda a: a.astype(DTYPES[target]))
        saturates = None
    if flushes:
        unflushed = compute
        compute = lambda a: unflushed(flush(a) if source == "f32" else a)  # noqa: E731
        if target == "f32":
            inner = compute
            compute = lambda a: flush(inner(a))  # noqa: E731
    if saturates and target in floats:
        compute = partial(_saturated, compute)
    return Operation(target, (source,), compute)


def _to_half_bits(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16)


TO_INTEGER: dict[str, Compute] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _float_to_float(target: str, source: str, mode: str, to_integer: str | None, x: Array) -> Array:
    if source == "bf16":
        x = from_bfloat16(x)
    if to_integer:
        x = TO_INTEGER[to_integer](x)
    if target == "bf16":
        return to_bfloat16(to_float32(x, "ro") if x.dtype == np.float64 else x, mode)
    if x.dtype == np.float64 and target == "f32":
        return canonical(to_float32(x, mode))
    assert mode == "rn", mode
    return x.astype(DTYPES[target])


def _integer_to_float(target: str, mode: str, x: Array) -> Array:
    if target == "bf16":
        assert x.dtype.itemsize <= 2, x.dtype  # exact in float32
        return to_bfloat16(x.astype(np.float32), mode)
    if mode != "rn":
        assert target == "f32" and x.dtype.itemsize <= 4, target  # exact in float64
        return to_float32(x.astype(np.float64), mode)
    return x.astype(DTYPES[target])


def _float_to_integer(target: str, source: str, to_integer: str, x: Array) -> Array:
    """Round and clamp. NaN becomes 0, but the highest bit alone if float64 or a 64-bit integer takes part."""
    dtype = DTYPES[target]
    limits = np.iinfo(dtype)
    x = TO_INTEGER[to_integer](from_bfloat16(x) if source == "bf16" else x).astype(np.float64)
    inside = (x >= limits.min) & (x < 2.0 ** limits.max.bit_length())
    result = np.where(inside, x, 0).astype(dtype)
    result = np.where(x < limits.min, dtype.type(limits.min), result)
    result = np.where(x >= 2.0 ** limits.max.bit_length(), dtype.type(limits.max), result)
    is_wide = source == "f64" or dtype.itemsize == 8
    of_nan = 1 << (8 * dtype.itemsize - 1) if is_wide else 0
    return np.where(np.isnan(x), np.array(of_nan, f"u{dtype.itemsize}").view(dtype), result)

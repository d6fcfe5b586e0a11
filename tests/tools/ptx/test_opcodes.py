"""Every opcode against its definition in the PTX ISA manual, written here for one thread with exact numbers, on
edge cases: NaN, infinities, -0, subnormal numbers, numbers half way between two, limits of integers and shift
amounts.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from tools.ptx.arithmetic import DTYPES, UnknownOpcodeError, operation

WORDS = [
    0,
    1,
    2,
    5,
    31,
    32,
    33,
    0x7F,
    0x80,
    0xFF,
    0x1234,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xDEADBEEF,
]
WORDS += [0xFFFFFFFF]
DOUBLE_WORDS = [*WORDS, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
AMOUNTS = [0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 2**31, 2**32 - 1]
# Bits of float32: zeros, smallest and largest subnormal, smallest normal, 1 and its neighbours, ties, large
# numbers, infinities, NaN.
FLOATS = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0x3F800001, 0x3F7FFFFF]
FLOATS += [
    0xBF800000,
    0x3F008000,
    0x3F018000,
    0x3F808001,
    0x40490FDB,
    0xC2F6E979,
    0x4B800001,
    0x7F7FFFFF,
    0xFF7FFFFF,
]
FLOATS += [
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00001,
    0x7F800001,
    0x3F000000,
    0x3FC00000,
    0x40200000,
    0xC0200000,
]
FLOATS += [0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x5F000000, 0x33800000, 0x34000001]
# Precision in bits, exponent of the smallest step, and largest number of a format.
FORMATS: dict[str, tuple[int, int, Fraction]] = {
    "f32": (24, -149, Fraction(2**128 - 2**104)),
    "f64": (53, -1074, Fraction(2**1024 - 2**971)),
    "f16": (11, -24, Fraction(65504)),
    "bf16": (8, -133, Fraction(2**128 - 2**120)),
}


def rounded(exact: Fraction, kind: str, mode: str = "rn") -> float:
    """Round to a format: nearest even, toward zero, down or up."""
    precision, smallest, largest = FORMATS[kind]
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** max(exponent - precision + 1, smallest)
    below, rest = divmod(exact / step, 1)
    up = {"rz": exact < 0 and rest > 0, "rm": False, "rp": rest > 0}.get(
        mode, rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    )
    result = (below + up) * step
    if abs(result) > largest:
        stays = mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        return float(math.copysign(largest if stays else math.inf, exact))
    return math.copysign(float(result), exact)


def fused(a: float, b: float, c: float, kind: str, mode: str = "rn") -> float:
    """a * b + c with one rounding."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return rounded(exact, kind, mode)
    negative_product = math.copysign(1, a) * math.copysign(1, b) < 0
    same = negative_product == (math.copysign(1, c) < 0)
    zero_terms = not (Fraction(a) * Fraction(b)) and not c
    negative = negative_product if same and zero_terms else mode == "rm"
    return -0.0 if negative else 0.0


def as_type(bits: list[int], kind: str) -> Any:
    dtype = DTYPES[kind]
    return np.array([b % 2 ** (8 * dtype.itemsize) for b in bits], f"u{dtype.itemsize}").view(dtype)


def run(opcode: str, *columns: list[int]) -> list[int]:
    """Apply an opcode to rows of bits; return bits."""
    defined = operation(opcode)
    arguments = [
        np.array(column, bool) if kind == "pred" else as_type(column, kind)
        for column, kind in zip(columns, defined.operands, strict=True)
    ]
    with np.errstate(all="ignore"):
        result = defined.compute(*arguments)
    if defined.result == "pred":
        return result.astype(int).tolist()
    return result.view(f"u{result.dtype.itemsize}").tolist()


def check(opcode: str, lists: list[list[int]], expected: Callable[..., int]) -> None:
    rows = list(product(*lists))
    got = run(opcode, *(list(column) for column in zip(*rows, strict=True)))
    for row, bits in zip(rows, got, strict=True):
        assert bits == expected(*row), f"{opcode} {[hex(x) for x in row]}: {bits:#x}, not {expected(*row):#x}"


def signed(bits: int, width: int) -> int:
    bits %= 2**width
    return bits - 2**width if bits >> (width - 1) else bits


def number(bits: int, kind: str = "f32") -> float:
    if kind == "bf16":
        bits, kind = bits << 16, "f32"
    with np.errstate(all="ignore"):
        return float(as_type([bits], kind)[0])


def bits_of(x: float, kind: str = "f32") -> int:
    """Return the bits of a number of the format; NaN is canonical."""
    if math.isnan(x):
        return {"f32": 0x7FFFFFFF, "bf16": 0x7FFF, "f16": 0x7FFF}[kind]
    if kind == "bf16":
        return int(np.float32(x).view(np.uint32)) >> 16
    with np.errstate(all="ignore"):
        return int(DTYPES[kind].type(x).view(f"u{DTYPES[kind].itemsize}"))


def quotient(a: int, b: int, width: int) -> int:
    return 2**width - 1 if b == 0 else int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


INTEGERS: dict[str, Callable[..., int]] = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "div": quotient,
    "rem": lambda a, b, w: 2**w - 1 if b == 0 else a - b * quotient(a, b, w),
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_arithmetic(name: str, kind: str) -> None:
    width = int(kind[1:])
    values = [w % 2**width for w in (DOUBLE_WORDS if width == 64 else WORDS)]

    def expected(a: int, b: int) -> int:
        if kind[0] == "s":
            a, b = signed(a, width), signed(b, width)
        return INTEGERS[name](a, b, width) % 2**width

    check(f"{name}.{kind}", [values, values], expected)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind: str) -> None:
    width = int(kind[1:])
    values = [w % 2**width for w in WORDS]
    value = (lambda x: signed(x, width)) if kind[0] == "s" else (lambda x: x)
    check(f"mul.wide.{kind}", [values, values], lambda a, b: value(a) * value(b) % 2 ** (2 * width))
    if width == 32:
        check(
            f"mad.wide.{kind}",
            [values, values, DOUBLE_WORDS],
            lambda a, b, c: (value(a) * value(b) + c) % 2**64,
        )
        check(f"mad.lo.{kind}", [values, values, WORDS], lambda a, b, c: (a * b + c) % 2**32)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u16", "u32", "u64"])
def test_shifts_clamp_their_amount(kind: str) -> None:
    width = int(kind[1:])
    values = [w % 2**width for w in DOUBLE_WORDS]
    if kind[0] == "b":
        check(f"shl.{kind}", [values, AMOUNTS], lambda a, n: a << min(n, width) & (2**width - 1))
    elif kind[0] == "s":
        check(f"shr.{kind}", [values, AMOUNTS], lambda a, n: (signed(a, width) >> min(n, width)) % 2**width)
    else:
        check(f"shr.{kind}", [values, AMOUNTS], lambda a, n: a >> min(n, width))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    """The loop of the manual, bit by bit."""
    width = int(kind[1:])

    def extract(a: int, b: int, c: int) -> int:
        position, length, top = b & 0xFF, c & 0xFF, width - 1
        sign = 0 if kind[0] == "u" or length == 0 else a >> min(position + length - 1, top) & 1
        bits = (a >> position + i & 1 if i < length and position + i <= top else sign for i in range(width))
        return sum(bit << i for i, bit in enumerate(bits))

    values = [w % 2**width for w in DOUBLE_WORDS]
    check(f"bfe.{kind}", [values, AMOUNTS, AMOUNTS], extract)

    def insert(a: int, b: int, c: int, d: int) -> int:
        position, length = c & 0xFF, d & 0xFF
        for i in range(length):
            if position + i < width:
                b = b & ~(1 << position + i) | (a >> i & 1) << position + i
        return b

    check(f"bfi.b{width}", [values[-6:], values[-6:], AMOUNTS, AMOUNTS], insert)


def test_prmt_selects_bytes_and_replicates_signs() -> None:
    def expected(a: int, b: int, selector: int) -> int:
        result = 0
        for i in range(4):
            digit = selector >> 4 * i & 0xF
            byte = (b << 32 | a) >> 8 * (digit & 7) & 0xFF
            if digit & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << 8 * i
        return result

    check("prmt.b32", [WORDS, WORDS, [0x3210, 0x7654, 0xBA98, 0x4440, 0x0F8E, 0x12345410]], expected)


@pytest.mark.parametrize("table", [0xEA, 0x80, 0xFE, 0x96, 0x6A, 0xC0, 0x01])
def test_lop3_is_its_table(table: int) -> None:
    def expected(a: int, b: int, c: int, _: int) -> int:
        bits = (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1 for i in range(32))
        return sum(bit << i for i, bit in enumerate(bits))

    check("lop3.b32", [WORDS, WORDS, WORDS, [table]], expected)


def test_logic() -> None:
    check("and.b32", [WORDS, WORDS], lambda a, b: a & b)
    check("or.b64", [DOUBLE_WORDS, DOUBLE_WORDS], lambda a, b: a | b)
    check("xor.b32", [WORDS, WORDS], lambda a, b: a ^ b)
    check("not.b32", [WORDS], lambda a: a ^ 0xFFFFFFFF)
    check("popc.b32", [WORDS], lambda a: a.bit_count())
    check("clz.b32", [WORDS], lambda a: 32 - a.bit_length())
    check("brev.b32", [WORDS], lambda a: int(f"{a:032b}"[::-1], 2))
    check("neg.s32", [WORDS], lambda a: -a % 2**32)
    check("selp.b32", [WORDS, WORDS, [0, 1]], lambda a, b, p: a if p else b)
    check("and.pred", [[0, 1], [0, 1]], lambda a, b: a & b)
    check("not.pred", [[0, 1]], lambda a: 1 - a)
    check("shf.l.wrap.b32", [WORDS, WORDS, AMOUNTS], lambda a, b, n: (b << 32 | a) << (n & 31) >> 32 & 0xFFFFFFFF)
    check("shf.r.clamp.b32", [WORDS, WORDS, AMOUNTS], lambda a, b, n: (b << 32 | a) >> min(n, 32) & 0xFFFFFFFF)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_rounds_once(mode: str) -> None:
    few = [*FLOATS[::2], 0x3F800001, 0x34000001]
    check(
        f"fma.{mode}.f32",
        [FLOATS, few, few],
        lambda a, b, c: bits_of(fused(number(a), number(b), number(c), "f32", mode)),
    )


def test_fma_where_two_roundings_differ() -> None:
    """1 + 2**-24 is half way, and what the product adds to it is lost in float64."""
    a, tiny, one = bits_of(2.0**-24), bits_of(1 + 2.0**-23), bits_of(1.0)
    assert run("fma.rn.f32", [a], [tiny], [one]) == [bits_of(1 + 2.0**-23)]
    assert run("fma.rn.f32", [a], [one], [one]) == [one]
    wide = [bits_of(x, "f64") for x in (1 + 2.0**-52, 1 - 2.0**-53, -1.0)]
    exact = Fraction(1 + 2.0**-52) * Fraction(1 - 2.0**-53) - 1
    assert run("fma.rn.f64", *([x] for x in wide)) == [bits_of(rounded(exact, "f64"), "f64")]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_16_bit_fma_of_pairs(kind: str) -> None:
    shift = 16 if kind == "bf16" else 0
    halves = [x >> 16 for x in FLOATS] if shift else [0, 0x8000, 1, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00]
    halves += [0x7E01] if not shift else []
    rows = list(product(halves, halves[::2], halves[1::2]))
    columns = [
        [x | (y << 16) for x, y in zip(column, reversed(column), strict=True)]
        for column in zip(*rows, strict=True)
    ]
    got = run(f"fma.rn.{kind}x2", *columns)
    with np.errstate(all="ignore"):
        expected = [bits_of(fused(*(number(x, kind) for x in row), kind), kind) for row in rows]
    nan = {"bf16": 0x7FFF, "f16": 0x7FFF}[kind]
    for i, bits in enumerate(got):
        for half, value in ((bits & 0xFFFF, expected[i]), (bits >> 16, expected[len(rows) - 1 - i])):
            is_nan = math.isnan(number(half, kind))
            assert (nan if is_nan else half) == value, (rows[i], hex(half), hex(value))


@pytest.mark.parametrize(
    ("name", "exact"), [("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul", lambda a, b: a * b)]
)
@pytest.mark.parametrize("flush", [False, True])
def test_float_arithmetic(name: str, exact: Callable[[float, float], float], flush: bool) -> None:
    def expected(a: int, b: int) -> int:
        x, y = (flushed(number(each)) if flush else number(each) for each in (a, b))
        with np.errstate(all="ignore"):
            wide = float(exact(np.float64(x), np.float64(y)))  # exact enough: 53 bits are at least 2 * 24 + 2
        result = number(bits_of(wide))
        return bits_of(flushed(result) if flush else result)

    check(f"{name}{'.ftz' if flush else ''}.f32", [FLOATS, FLOATS], expected)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def test_sign_minimum_and_maximum() -> None:
    check("neg.f32", [FLOATS], lambda a: a ^ 0x80000000)
    check("abs.f32", [FLOATS], lambda a: a & 0x7FFFFFFF)

    def extreme(a: int, b: int, largest: bool, propagates: bool) -> int:
        x, y = number(a), number(b)
        if math.isnan(x) or math.isnan(y):
            both = math.isnan(x) and math.isnan(y)
            return 0x7FFFFFFF if propagates or both else b if math.isnan(x) else a
        if x == y:
            return min(a, b) if largest else max(a, b)  # equal, or zeros of two signs
        return a if (x > y) == largest else b

    for name, propagates in product(("min", "max"), (False, True)):
        opcode = f"{name}{'.NaN' if propagates else ''}.f32"
        check(opcode, [FLOATS, FLOATS], lambda a, b, n=name, p=propagates: extreme(a, b, n == "max", p))


def test_comparisons_with_nan() -> None:
    compare: dict[str, Callable[[float, float], bool]] = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a < b or a > b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    for name, ordered in compare.items():
        check(f"setp.{name}.f32", [FLOATS, FLOATS], lambda a, b, f=ordered: int(f(number(a), number(b))))

        def unordered(a: int, b: int, f: Callable[[float, float], bool] = ordered) -> int:
            x, y = number(a), number(b)
            return int(f(x, y) or math.isnan(x) or math.isnan(y))

        check(f"setp.{name}u.f32", [FLOATS, FLOATS], unordered)
    check("setp.nan.f32", [FLOATS, FLOATS], lambda a, b: int(math.isnan(number(a)) or math.isnan(number(b))))
    check("setp.num.f32", [FLOATS, FLOATS], lambda a, b: int(not (math.isnan(number(a)) or math.isnan(number(b)))))
    check("setp.lt.s32", [WORDS, WORDS], lambda a, b: int(signed(a, 32) < signed(b, 32)))
    check("setp.lt.u32", [WORDS, WORDS], lambda a, b: int(a < b))
    check("setp.hi.u64", [DOUBLE_WORDS, DOUBLE_WORDS], lambda a, b: int(a > b))
    check("setp.gt.or.s32", [WORDS, WORDS, [0, 1]], lambda a, b, p: int(signed(a, 32) > signed(b, 32) or p))


def test_conversion_of_floats() -> None:
    check("cvt.rn.bf16.f32", [FLOATS], lambda a: bits_of(to_format(number(a), "bf16"), "bf16"))
    check("cvt.rz.bf16.f32", [FLOATS], lambda a: bits_of(to_format(number(a), "bf16", "rz"), "bf16"))
    check("cvt.f32.bf16", [[a >> 16 for a in FLOATS]], lambda a: a << 16)
    check(
        "cvt.rn.bf16x2.f32",
        [FLOATS, FLOATS],
        lambda a, b: (
            bits_of(to_format(number(a), "bf16"), "bf16") << 16 | bits_of(to_format(number(b), "bf16"), "bf16")
        ),
    )
    numbers = [a for a in FLOATS if not math.isnan(number(a))]
    check("cvt.rn.f16.f32", [numbers], lambda a: bits_of(to_format(number(a), "f16"), "f16"))
    check("cvt.f64.f32", [numbers], lambda a: bits_of(number(a), "f64"))
    doubles = [
        bits_of(x, "f64") for x in (1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-52, -(1 + 3 * 2.0**-24), 1e300, 2.0**-150)
    ]
    for mode in ("rn", "rz", "rm", "rp"):
        check(
            f"cvt.{mode}.f32.f64",
            [doubles],
            lambda a, m=mode: bits_of(rounded(Fraction(number(a, "f64")), "f32", m)),
        )
    check("cvt.rn.bf16.f64", [doubles], lambda a: bits_of(rounded(Fraction(number(a, "f64")), "bf16"), "bf16"))

    def saturated(a: int) -> int:
        x = flushed(number(a))
        return bits_of(0.0 if math.isnan(x) or x <= 0 else min(x, 1.0))

    check("cvt.ftz.sat.f32.f32", [FLOATS], saturated)
    check("cvt.rpi.f32.f32", [numbers], lambda a: bits_of(_integral(number(a), "rpi")))
    check("cvt.rni.f32.f32", [numbers], lambda a: bits_of(_integral(number(a), "rni")))


def to_format(x: float, kind: str, mode: str = "rn") -> float:
    return math.copysign(rounded(Fraction(x), kind, mode), x) if math.isfinite(x) else x


def _integral(x: float, mode: str) -> float:
    if not math.isfinite(x):
        return x
    return math.copysign({"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}[mode](x), x)


@pytest.mark.parametrize("mode", ["rzi", "rni", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_to_integers_clamp(mode: str, target: str, source: str) -> None:
    width = int(target[1:])
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if target[0] == "s" else (0, 2**width - 1)
    values = (
        FLOATS if source == "f32" else [bits_of(number(a), "f64") for a in FLOATS if not math.isnan(number(a))]
    )
    values = [*values, 0x7FF8000000000000] if source == "f64" else values

    def expected(a: int) -> int:
        x = number(a, source)
        if math.isnan(x):
            return 1 << (width - 1) if source == "f64" or width == 64 else 0
        if math.isinf(x):
            return (high if x > 0 else low) % 2**width
        return min(max(int(_integral(x, mode)), low), high) % 2**width

    check(f"cvt.{mode}.{target}.{source}", [values], expected)


def test_conversion_of_integers() -> None:
    check("cvt.s64.s32", [WORDS], lambda a: signed(a, 32) % 2**64)
    check("cvt.u64.u32", [WORDS], lambda a: a)
    check("cvt.u32.u64", [DOUBLE_WORDS], lambda a: a % 2**32)
    check("cvt.s16.s8", [[a & 0xFF for a in WORDS]], lambda a: signed(a, 8) % 2**16)
    check("cvt.s32.s16", [[a & 0xFFFF for a in WORDS]], lambda a: signed(a, 16) % 2**32)
    check("cvt.sat.s8.s32", [WORDS], lambda a: min(max(signed(a, 32), -128), 127) % 2**8)
    for kind, values in (("s32", WORDS), ("u32", WORDS), ("s64", DOUBLE_WORDS), ("u64", DOUBLE_WORDS)):
        width = int(kind[1:])
        value = (lambda a, w=width: signed(a, w)) if kind[0] == "s" else (lambda a: a)
        check(f"cvt.rn.f32.{kind}", [values], lambda a, v=value: bits_of(rounded(Fraction(v(a)), "f32")))
        check(f"cvt.rn.f64.{kind}", [values], lambda a, v=value: bits_of(rounded(Fraction(v(a)), "f64"), "f64"))
    check("cvt.rz.f32.s32", [WORDS], lambda a: bits_of(rounded(Fraction(signed(a, 32)), "f32", "rz")))


@pytest.mark.parametrize(
    ("opcode", "function", "error"),
    [
        ("ex2.approx.f32", lambda x: 2.0**x, 2.0**-22),
        ("rcp.approx.f32", lambda x: 1 / x, 2.0**-23),
        ("rsqrt.approx.f32", lambda x: x**-0.5, 2.0**-22.9),
        ("sqrt.approx.f32", math.sqrt, 2.0**-23),
        ("lg2.approx.f32", math.log2, 2.0**-22),
        ("sin.approx.f32", math.sin, 2.0**-20.5),
        ("cos.approx.f32", math.cos, 2.0**-20.5),
        ("tanh.approx.f32", math.tanh, 2.0**-11),
    ],
)
def test_approximations_are_within_the_error_of_the_manual(
    opcode: str, function: Callable[[float], float], error: float
) -> None:
    x = np.linspace(0.1, 9, 100).astype(np.float32)
    got = np.array(run(opcode, x.view(np.uint32).tolist()), np.uint32).view(np.float32)
    exact = np.array([function(float(each)) for each in x])
    assert (np.abs(got - exact) <= error * np.abs(exact) + 2.0**-149).all()


def test_approximations_of_special_numbers() -> None:
    inf, nan = 0x7F800000, 0x7FFFFFFF
    assert run("ex2.approx.ftz.f32", [0xFF800000, inf, 0x80000000, 1]) == [0, inf, bits_of(1.0), bits_of(1.0)]
    assert run("rcp.approx.ftz.f32", [0, 0x80000000, inf, 1, nan]) == [inf, 0xFF800000, 0, inf, nan]
    assert run("rsqrt.approx.f32", [0, inf, bits_of(-1.0)]) == [inf, 0, nan]
    assert run("lg2.approx.f32", [0, bits_of(-1.0), inf]) == [0xFF800000, nan, inf]
    *special, inexact = run("div.full.f32", [bits_of(1.0), 0, bits_of(3.0)], [0, 0, bits_of(2.0)])
    assert special == [inf, nan] and 1 <= abs(inexact - bits_of(1.5)) <= 2
    assert run("div.rn.f32", [bits_of(3.0)], [bits_of(2.0)]) == [bits_of(1.5)]


def test_what_has_no_definition_is_refused() -> None:
    for opcode in ("frobnicate.b32", "add.weird.f32", "cvt.rna.tf32.f32"):
        with pytest.raises((UnknownOpcodeError, AssertionError, IndexError)):
            operation(opcode)

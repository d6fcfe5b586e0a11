"""Activations number by number, in float32 and rounded once: those of torch give a number other bits behind the
last whole vector than inside one, so that it depends on how many rows there are."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.cpu.compile import Compiled, Once, runs_here
from localllm.runtime.kernels.cpu.functions import exp, sigmoid, tanh
from localllm.runtime.kernels.cpu.layout import KINDS
from localllm.runtime.kernels.cpu.program import LANES, Program, Value

CLAMP, SHARPNESS = 7.0, 1.702  # gpt-oss: swiglu_limit and swiglu_alpha of its release
# erf(x) = 1 - t (a1 + t (a2 + ...)) exp(-x^2), t = 1 / (1 + RATE x), for x >= 0 within 1.5e-7 (Abramowitz and Stegun 7.1.26)
RATE = 0.3275911
ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
FEW = 2**14  # numbers that one thread has done sooner than two


def silu(p: Program, x: Value) -> Value:
    return x * sigmoid(p, x)


def gelu_tanh(p: Program, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) is x * sigmoid(2 u)."""
    return x * sigmoid(p, (x + x * x * x * 0.044715) * 1.5957691216057308)


def gelu(p: Program, x: Value) -> Value:
    """x times the normal distribution's mass below x."""
    size = p.magnitude(x) * 0.7071067811865476
    t = p.vector(1.0) / (size * RATE + 1.0)
    total = p.vector(ERF[0])
    for factor in ERF[1:]:
        total = p.fma(total, t, p.vector(factor))
    beyond = total * t * exp(p, p.vector(0.0) - size * size) * 0.5  # mass beyond |x|
    return p.where_negative(x, x * beyond, x - x * beyond)


def one(activation: str) -> Callable[[Program, Value], Value]:
    functions = {"silu": silu, "sigmoid": sigmoid, "tanh": tanh, "gelu_tanh": gelu_tanh, "gelu": gelu}
    return functions[activation]


def gate(p: Program, activation: Activation, x: Value, up: Value) -> Value:
    if activation != "swiglu_clamped":
        return one(activation)(p, x) * up
    x = p.unless_nan(x, p.smallest(x, p.vector(CLAMP)))
    up = p.unless_nan(up, p.smallest(p.largest(up, p.vector(-CLAMP)), p.vector(CLAMP)))
    return x * sigmoid(p, x * SHARPNESS) * (up + 1.0)


def write_gated(p: Program, kind: torch.dtype, activation: Activation) -> None:
    """x [rows, 2 columns], gates first -> y [rows, columns]"""
    x, y = p.addresses(2)
    rows, columns = p.counts(2, begin=2)
    size = kind.itemsize
    begin, end = p.share(rows)
    with p.loop(begin, end) as row:
        gates, out = p.at(x, row * columns * (2 * size)), p.at(y, row * columns * size)
        each(p, kind, columns, [gates, p.at(gates, columns * size)], out, lambda a, b: gate(p, activation, a, b))


def write_mapped(p: Program, kind: torch.dtype, function: str) -> None:
    """x [count] -> y [count]"""
    x, y = p.addresses(2)
    [count] = p.counts(1, begin=2)
    size, blocks = kind.itemsize, (count + (LANES - 1)) / LANES
    begin, end = (p.less(block * LANES, count) for block in p.share(blocks))
    each(p, kind, end - begin, [p.at(x, begin * size)], p.at(y, begin * size), lambda a: one(function)(p, a))


def each(
    p: Program, kind: torch.dtype, count: Value, sources: list[Value], out: Value, made: Callable[..., Value]
) -> None:
    """`count` numbers, 16 at a time; those behind the last whole vector in the same way."""
    element, size = KINDS[kind], kind.itemsize
    whole = count / LANES * LANES
    with p.loop(p.index(0), whole, LANES) as at:
        p.store_floats(made(*(p.load_floats(element, x, at * size) for x in sources)), element, out, at * size)
    with p.loop(whole, count, LANES) as at:
        some = (p.load_some(element, p.at(x, at * size), count - at) for x in sources)
        p.store_some(made(*some), element, out, at * size, count - at)


@Once
def gated_program(kind: torch.dtype, activation: Activation) -> Compiled:
    return Compiled(lambda p: write_gated(p, kind, activation), "gated", 4)


@Once
def mapped_program(kind: torch.dtype, function: str) -> Compiled:
    return Compiled(lambda p: write_mapped(p, kind, function), "mapped", 3)


def takes(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in KINDS and x.numel() > 0 and runs_here()


def gated(x: Tensor, activation: Activation) -> Tensor:
    """x: [..., 2 n] that is taken -> [..., n]"""
    x, n = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], n)
    run = gated_program(x.dtype, activation)
    (run.alone if y.numel() < FEW else run)(x.data_ptr(), y.data_ptr(), y.numel() // n, n)
    return y


def mapped(x: Tensor, function: str) -> Tensor:
    """x: any shape, taken -> its shape. function: `silu`, `sigmoid` or `tanh`"""
    x = x.contiguous()
    y, run = torch.empty_like(x), mapped_program(x.dtype, function)
    (run.alone if y.numel() < FEW else run)(x.data_ptr(), y.data_ptr(), y.numel())
    return y

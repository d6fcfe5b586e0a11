"""Activations number by number, in float32 and rounded once: those of torch give a number other bits behind the
last whole vector than inside one, so that it depends on how many rows there are."""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.cpu.attention_ir import exp, sigmoid, tanh
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce, cpu_supported
from localllm.runtime.kernels.cpu.ir import FLOAT, LANES, Program, Value
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # gpt-oss: swiglu_limit and swiglu_alpha of its release
# erf(x) = 1 - t (a1 + t (a2 + ...)) exp(-x^2), t = 1 / (1 + RATE x), for x >= 0 within 1.5e-7 (Abramowitz and
# Stegun, 7.1.26)
ERF_RATE = 0.3275911
ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
SINGLE_THREAD_ELEMENTS = 2**14  # numbers that one thread has done sooner than two


def silu(p: Program, x: Value) -> Value:
    return x * sigmoid(p, x)


def gelu_tanh(p: Program, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) is x * sigmoid(2 u)."""
    return x * sigmoid(p, (x + x * x * x * 0.044715) * 1.5957691216057308)


def gelu(p: Program, x: Value) -> Value:
    """x times the normal distribution's mass below x."""
    size = p.absolute(x) * 0.7071067811865476
    t = p.vector(1.0) / (size * ERF_RATE + 1.0)
    total = p.vector(ERF_COEFFICIENTS[0])
    for factor in ERF_COEFFICIENTS[1:]:
        total = p.fma(total, t, p.vector(factor))
    beyond = total * t * exp(p, p.vector(0.0) - size * size) * 0.5  # mass beyond |x|
    return p.select_negative(x, x * beyond, x - x * beyond)


def activation_function(activation: str) -> Callable[[Program, Value], Value]:
    functions = {"silu": silu, "sigmoid": sigmoid, "tanh": tanh, "gelu_tanh": gelu_tanh, "gelu": gelu}
    return functions[activation]


def emit_gate(p: Program, activation: Activation, x: Value, up: Value) -> Value:
    if activation != "swiglu_clamped":
        return activation_function(activation)(p, x) * up
    x = p.propagate_nan(x, p.minnum(x, p.vector(SWIGLU_LIMIT)))
    up = p.propagate_nan(up, p.minnum(p.maxnum(up, p.vector(-SWIGLU_LIMIT)), p.vector(SWIGLU_LIMIT)))
    return x * sigmoid(p, x * SWIGLU_ALPHA) * (up + 1.0)


def emit_gated(p: Program, kind: torch.dtype, activation: Activation) -> None:
    """x [rows, 2 columns], gates first -> y [rows, columns]"""
    x, y = p.load_addresses(2)
    rows, columns = p.load_counts(2, begin=2)
    size = kind.itemsize
    begin, end = p.part_range(rows)
    with p.loop(begin, end) as row:
        gates, out = p.address(x, row * columns * (2 * size)), p.address(y, row * columns * size)
        emit_each(
            p,
            kind,
            columns,
            [gates, p.address(gates, columns * size)],
            out,
            lambda a, b: emit_gate(p, activation, a, b),
        )


def emit_mapped(p: Program, kind: torch.dtype, function: str) -> None:
    """x [count] -> y [count]"""
    x, y = p.load_addresses(2)
    [count] = p.load_counts(1, begin=2)
    size, blocks = kind.itemsize, (count + (LANES - 1)) / LANES
    begin, end = (p.min_index(block * LANES, count) for block in p.part_range(blocks))
    emit_each(
        p,
        kind,
        end - begin,
        [p.address(x, begin * size)],
        p.address(y, begin * size),
        lambda a: activation_function(function)(p, a),
    )


def emit_each(
    p: Program, kind: torch.dtype, count: Value, sources: list[Value], out: Value, made: Callable[..., Value]
) -> None:
    """`count` numbers, 16 at a time; those behind the last whole vector in the same way."""
    element, size = ELEMENT_TYPES[kind], kind.itemsize
    whole = count / LANES * LANES
    with p.loop(p.index_constant(0), whole, LANES) as at:
        p.store_floats(made(*(p.load_floats(element, x, at * size) for x in sources)), element, out, at * size)
    with p.loop(whole, count, LANES) as at:
        some = (p.load_first(element, p.address(x, at * size), count - at) for x in sources)
        p.store_first(made(*some), element, out, at * size, count - at)


@CompileOnce
def compile_gated(kind: torch.dtype, activation: Activation) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_gated(p, kind, activation), "gated", 4)


@CompileOnce
def compile_mapped(kind: torch.dtype, function: str) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_mapped(p, kind, function), "mapped", 3)


def supports(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in ELEMENT_TYPES and x.numel() > 0 and cpu_supported()


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """x: [..., 2 n] that is taken -> [..., n]"""
    x, n = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], n)
    run = compile_gated(x.dtype, activation)
    (run.run_single if y.numel() < SINGLE_THREAD_ELEMENTS else run)(x.data_ptr(), y.data_ptr(), y.numel() // n, n)
    return y


def map_elements(x: Tensor, function: str) -> Tensor:
    """x: any shape, taken -> its shape. function: `silu`, `sigmoid` or `tanh`"""
    x = x.contiguous()
    y, run = torch.empty_like(x), compile_mapped(x.dtype, function)
    (run.run_single if y.numel() < SINGLE_THREAD_ELEMENTS else run)(x.data_ptr(), y.data_ptr(), y.numel())
    return y


# RMSNorm: torch's takes 16 us for a row of 2048, and 47 us where the weights that were read before it have
# pushed its code out of the caches; a model has two of them a layer.


def emit_rms_norm(p: Program, kind: torch.dtype, weighted: bool) -> None:
    """x [rows, K] -> y [rows, K]: x / sqrt(mean(x^2) + eps) * weight, in float32 but for x and y"""
    x, weight, y = p.load_addresses(3)
    rows, columns = p.load_counts(2, begin=3)
    eps = p.load(FLOAT, p.arguments, 8 * 5)
    size = kind.itemsize
    begin, end = p.part_range(rows)
    with p.loop(begin, end) as row:
        here = row * columns * size
        squares = p.variable(p.vector(0.0))
        with p.loop(p.index_constant(0), columns, LANES) as at:
            number = p.load_floats(ELEMENT_TYPES[kind], p.address(x, here), at * size)
            squares.value = p.fma(number, number, squares.value)
        mean = p.reduce_sum(squares.value) / columns.to_float32()
        scale = (p.float_constant(1.0) / p.sqrt(mean + eps)).broadcast()
        with p.loop(p.index_constant(0), columns, LANES) as at:
            number = p.load_floats(ELEMENT_TYPES[kind], p.address(x, here), at * size) * scale
            if weighted:
                number = number * p.load_floats(FLOAT, weight, at * 4)
            p.store_floats(number, ELEMENT_TYPES[kind], p.address(y, here), at * size)


@CompileOnce
def compile_rms_norm(kind: torch.dtype, weighted: bool) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_rms_norm(p, kind, weighted), "normed", 6)


def supports_rms_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Is it for this program?"""
    whole = x.shape[-1] % LANES == 0 and x.is_contiguous() and x.numel() > 0
    if x.device.type != "cpu" or x.dtype not in ELEMENT_TYPES or not whole or not cpu_supported():
        return False
    if weight is None:
        return True
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()  # the program takes x's word for it
    return fits and weight.dtype == torch.float32 and weight.device == x.device


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x: [..., K] that `takes` accepts; weight: [K] float32 -> the shape of x"""
    y, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    run = compile_rms_norm(x.dtype, weight is not None)
    bits = struct.unpack("<q", struct.pack("<fi", eps, 0))[0]
    (run.run_single if rows < LANES else run)(
        x.data_ptr(), 0 if weight is None else weight.data_ptr(), y.data_ptr(), rows, columns, bits
    )
    return y

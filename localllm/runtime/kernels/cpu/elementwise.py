"""Activations and RMSNorm in float32, rounded once.

Batch invariant: every element is computed by the same vector instructions. torch computes those behind the last
whole vector differently, so that their bits depend on the number of rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported, float_bits
from localllm.runtime.kernels.cpu.ir import FLOAT, LANES, Program, Value
from localllm.runtime.kernels.cpu.layout import ELEMENT_TYPES

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # gpt-oss: swiglu_limit and swiglu_alpha of its release
EXP_MAX, EXP_MIN = 88.0, -87.3  # arguments of exp are clamped: the results are 2^127 and nearly zero
# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2 (Cephes, expf)
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LN_2_HIGH, LN_2_LOW = 0.693359375, -2.12194440e-4
# erf(x) = 1 - t (a1 + t (a2 + ...)) exp(-x^2), t = 1 / (1 + RATE x), for x >= 0 within 1.5e-7 (Abramowitz and
# Stegun, 7.1.26)
ERF_RATE = 0.3275911
ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
SINGLE_THREAD_ELEMENTS = 2**14  # below this number of elements one thread is faster than two


def exp(p: Program, x: Value) -> Value:
    """exp(x) = 2^n exp(r) with n = round(x / ln 2), r = x - n ln 2 (Cody and Waite)."""
    clamped = p.minnum(p.maxnum(x, p.vector(EXP_MIN)), p.vector(EXP_MAX))
    power = (clamped * 1.4426950408889634).round_to_int()
    n = power.to_float32()
    r = p.fma(n, p.vector(-LN_2_LOW), p.fma(n, p.vector(-LN_2_HIGH), clamped))
    polynomial = p.vector(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        polynomial = p.fma(polynomial, r, p.vector(coefficient))
    exp_r = p.fma(polynomial, r * r, r) + 1.0
    return p.propagate_nan(x, exp_r * p.bitcast_float((power + 127) << 23))


def sigmoid(p: Program, x: Value) -> Value:
    """1 / (1 + exp(-x))"""
    return p.vector(1.0) / (exp(p, p.vector(0.0) - x) + 1.0)


def tanh(p: Program, x: Value) -> Value:
    """1 - 2 / (1 + exp(2 x)), with an absolute error below 1.2e-7."""
    return p.vector(1.0) - p.vector(2.0) / (exp(p, x * 2.0) + 1.0)


def silu(p: Program, x: Value) -> Value:
    """x * sigmoid(x)"""
    return x * sigmoid(p, x)


def gelu_tanh(p: Program, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)"""
    return x * sigmoid(p, (x + x * x * x * 0.044715) * 1.5957691216057308)


def gelu(p: Program, x: Value) -> Value:
    """x * Phi(x), Phi being the cumulative distribution function of the normal distribution."""
    scaled = p.absolute(x) * 0.7071067811865476
    t = p.vector(1.0) / (scaled * ERF_RATE + 1.0)
    polynomial = p.vector(ERF_COEFFICIENTS[0])
    for coefficient in ERF_COEFFICIENTS[1:]:
        polynomial = p.fma(polynomial, t, p.vector(coefficient))
    tail = polynomial * t * exp(p, p.vector(0.0) - scaled * scaled) * 0.5  # 1 - Phi(|x|)
    return p.select_negative(x, x * tail, x - x * tail)


def activation_function(activation: str) -> Callable[[Program, Value], Value]:
    functions = {"silu": silu, "sigmoid": sigmoid, "tanh": tanh, "gelu_tanh": gelu_tanh, "gelu": gelu}
    return functions[activation]


def emit_gate(p: Program, activation: Activation, x: Value, up: Value) -> Value:
    """activation(x) * up; of `swiglu_clamped`, clamp(x) * sigmoid(alpha * clamp(x)) * (clamp(up) + 1)."""
    if activation != "swiglu_clamped":
        return activation_function(activation)(p, x) * up
    x = p.propagate_nan(x, p.minnum(x, p.vector(SWIGLU_LIMIT)))
    up = p.propagate_nan(up, p.minnum(p.maxnum(up, p.vector(-SWIGLU_LIMIT)), p.vector(SWIGLU_LIMIT)))
    return x * sigmoid(p, x * SWIGLU_ALPHA) * (up + 1.0)


def emit_gated(p: Program, dtype: torch.dtype, activation: Activation) -> None:
    """x [rows, 2 columns], gates first -> y [rows, columns]"""
    x, y = p.load_addresses(2)
    rows, columns = p.load_counts(2, begin=2)
    size = dtype.itemsize
    begin, end = p.part_range(rows)
    with p.loop(begin, end) as row:
        gates, out = p.address(x, row * columns * (2 * size)), p.address(y, row * columns * size)
        emit_each(
            p,
            dtype,
            columns,
            [gates, p.address(gates, columns * size)],
            out,
            lambda a, b: emit_gate(p, activation, a, b),
        )


def emit_mapped(p: Program, dtype: torch.dtype, function: str) -> None:
    """x [count] -> y [count]"""
    x, y = p.load_addresses(2)
    [count] = p.load_counts(1, begin=2)
    size, blocks = dtype.itemsize, (count + (LANES - 1)) / LANES
    begin, end = (p.min_index(block * LANES, count) for block in p.part_range(blocks))
    emit_each(
        p,
        dtype,
        end - begin,
        [p.address(x, begin * size)],
        p.address(y, begin * size),
        lambda a: activation_function(function)(p, a),
    )


def emit_each(
    p: Program, dtype: torch.dtype, count: Value, sources: list[Value], out: Value, function: Callable[..., Value]
) -> None:
    """Apply `function` to `count` elements of `sources`, 16 at a time; the last ones as a masked vector."""
    element, size = ELEMENT_TYPES[dtype], dtype.itemsize
    whole = count / LANES * LANES
    with p.loop(p.index_constant(0), whole, LANES) as i:
        numbers = (p.load_floats(element, x, i * size) for x in sources)
        p.store_floats(function(*numbers), element, out, i * size)
    with p.loop(whole, count, LANES) as i:
        numbers = (p.load_first(element, p.address(x, i * size), count - i) for x in sources)
        p.store_first(function(*numbers), element, out, i * size, count - i)


@CompileOnce
def compile_gated(dtype: torch.dtype, activation: Activation) -> KernelSource:
    return KernelSource(lambda p: emit_gated(p, dtype, activation), "gated", 4)


@CompileOnce
def compile_mapped(dtype: torch.dtype, function: str) -> KernelSource:
    return KernelSource(lambda p: emit_mapped(p, dtype, function), "mapped", 3)


def supports(x: Tensor) -> bool:
    """Return whether the activation kernels support x."""
    return x.is_cpu and x.dtype in ELEMENT_TYPES and x.numel() > 0 and cpu_supported()


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """x: [..., 2 n], supported -> [..., n]"""
    x, n = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], n)
    run = compile_gated(x.dtype, activation)
    (run.run_single if y.numel() < SINGLE_THREAD_ELEMENTS else run)(x.data_ptr(), y.data_ptr(), y.numel() // n, n)
    return y


def map_elements(x: Tensor, function: str) -> Tensor:
    """x: any shape, supported -> the same shape. function: `silu`, `sigmoid` or `tanh`"""
    x = x.contiguous()
    y, run = torch.empty_like(x), compile_mapped(x.dtype, function)
    (run.run_single if y.numel() < SINGLE_THREAD_ELEMENTS else run)(x.data_ptr(), y.data_ptr(), y.numel())
    return y


def emit_rms_norm(p: Program, dtype: torch.dtype, weighted: bool) -> None:
    """x [rows, K] -> y [rows, K] = x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    torch takes 16 us for a row of 2048, and 47 us where reading weights has evicted its code from the caches; a
    model has two norms per layer.
    """
    x, weight, y = p.load_addresses(3)
    rows, columns = p.load_counts(2, begin=3)
    eps = p.load(FLOAT, p.arguments, 8 * 5)
    with p.loop(*p.part_range(rows)) as row:
        offset = row * columns * dtype.itemsize
        source, target = p.address(x, offset), p.address(y, offset)
        emit_rms_norm_row(p, dtype, source, weight if weighted else None, target, columns, eps)


def emit_rms_norm_row(
    p: Program, dtype: torch.dtype, x: Value, weight: Value | None, y: Value, columns: Value, eps: Value
) -> None:
    """x [columns] -> y [columns]; columns: a multiple of 16"""
    element, size = ELEMENT_TYPES[dtype], dtype.itemsize
    squares = p.variable(p.vector(0.0))
    with p.loop(p.index_constant(0), columns, LANES) as i:
        number = p.load_floats(element, x, i * size)
        squares.value = p.fma(number, number, squares.value)
    mean = p.reduce_sum(squares.value) / columns.to_float32()
    scale = (p.float_constant(1.0) / p.sqrt(mean + eps)).broadcast()
    with p.loop(p.index_constant(0), columns, LANES) as i:
        number = p.load_floats(element, x, i * size) * scale
        if weight:
            number = number * p.load_floats(FLOAT, weight, i * 4)
        p.store_floats(number, element, y, i * size)


@CompileOnce
def compile_rms_norm(dtype: torch.dtype, weighted: bool) -> KernelSource:
    return KernelSource(lambda p: emit_rms_norm(p, dtype, weighted), "rms_norm", 6)


def supports_rms_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the RMSNorm kernel supports x and its weight."""
    whole_vectors = x.shape[-1] % LANES == 0 and x.is_contiguous() and x.numel() > 0
    if x.device.type != "cpu" or x.dtype not in ELEMENT_TYPES or not whole_vectors or not cpu_supported():
        return False
    if weight is None:
        return True
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()
    return fits and weight.dtype == torch.float32 and weight.device == x.device


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x: [..., K] and weight: [K] float32 that `supports_rms_norm` accepts -> the shape of x"""
    y, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    run = compile_rms_norm(x.dtype, weight is not None)
    p_weight = 0 if weight is None else weight.data_ptr()
    (run.run_single if rows < LANES else run)(x.data_ptr(), p_weight, y.data_ptr(), rows, columns, float_bits(eps))
    return y

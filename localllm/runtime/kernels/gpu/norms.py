"""Norms over the last dimension: y = (x - mean) * factor * weight, where

rms:   mean = 0, factor = 1 / sqrt(sum(x^2) / K + eps)
layer: mean = sum(x) / K, factor = 1 / sqrt(sum((x - mean)^2) / K + eps)
unit:  mean = 0, factor = 1 / sqrt(sum(x^2) + 1e-6), in float32

then y * silu(gate), or residual + y * scale. x: any leading shape, copied only if its rows need more than two
strides; weight: [K] float32 or None.

Bytes: x and y once each, the weight once per program. Rows longer than MAX_REGISTER_COLUMNS are read two or three
times, after the first time from a cache.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_unsupported,
    launch_kernel,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.rounding import round_to_dtype
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import kernel

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_REGISTER_COLUMNS = 2**14  # columns that a program holds in registers: 32 per thread of 16 warps
MAX_COLUMNS = 2**16
TILE_ELEMENTS = 2**11  # elements of short rows per program
LONG_ROW_BLOCK = 2**13  # columns at a time of a long row


@triton.jit(do_not_specialize=["rows", "x_count", "gate_count"])
def norm_kernel(
    p_x,
    p_weight,
    p_gate,
    p_residual,
    p_y,
    rows,
    columns,
    x_count,  # rows at the inner stride
    x_outer,
    x_inner,
    gate_count,
    gate_outer,
    gate_inner,
    eps,
    scale,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)[None, :]
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(p_weight + i, mask=i < columns, other=0.0)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    m = (row < rows) & (i < columns)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    x = tl.load(p_x + row // x_count * x_outer + row % x_count * x_inner + i, mask=m, other=0.0).to(tl.float32)
    if KIND == "layer":
        x = tl.where(m, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    squares = tl.sum(x * x, 1)
    factor = tl.rsqrt((squares if KIND == "unit" else squares / columns) + eps)
    y = x * factor[:, None]
    if WEIGHTED:
        y *= weight
    if GATED:
        p = p_gate + row // gate_count * gate_outer + row % gate_count * gate_inner + i
        gate = tl.load(p, mask=m, other=0.0).to(tl.float32)
        y *= gate * tl.sigmoid(gate)
    if ADDED:
        y = tl.load(p_residual + row * columns + i, mask=m, other=0.0).to(tl.float32) + y * scale
    tl.store(p_y + row * columns + i, round_to_dtype(y, p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["x_count"])
def long_norm_kernel(
    p_x,
    p_weight,
    p_y,
    columns,
    x_count,
    x_outer,
    x_inner,
    eps,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    p_x += row // x_count * x_outer + row % x_count * x_inner
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    mean = 0.0
    if KIND == "layer":
        total = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, columns, BLOCK):
            total += tl.load(p_x + begin + i, mask=begin + i < columns, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        m = begin + i < columns
        x = tl.where(m, tl.load(p_x + begin + i, mask=m, other=0.0).to(tl.float32) - mean, 0.0)
        squares += x * x
    factor = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for begin in range(0, columns, BLOCK):
        m = begin + i < columns
        y = (tl.load(p_x + begin + i, mask=m, other=0.0).to(tl.float32) - mean) * factor
        if WEIGHTED:
            y *= tl.load(p_weight + begin + i, mask=m, other=0.0)
        tl.store(p_y + row * columns + begin + i, round_to_dtype(y, p_y.dtype.element_ty), mask=m)


def row_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return (x, number of rows at the inner stride, outer stride, inner stride), copying x if necessary.

    It is copied if two strides do not describe where its rows are.
    """
    sizes: list[list[int]] = []  # [size, stride], with contiguous dimensions joined
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes and sizes[-1][1] == size * stride:
            sizes[-1] = [sizes[-1][0] * size, stride]
        else:
            sizes.append([size, stride])
    if len(sizes) > 2 or x.stride(-1) != 1:
        return row_strides(x.contiguous())
    outer, inner = [[1, 0], [1, 0], *sizes][-2:]
    return x, inner[0], outer[1], inner[1]


def launch_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_type: str,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Launch a norm. A program processes one row, or several short ones.

    Their number depends on the length of rows alone, so that the order of sums does not depend on the number of
    rows.
    """
    y = torch.empty(x.shape, dtype=torch.float32 if norm_type == "unit" else x.dtype, device=x.device)
    if not x.numel():
        return y
    columns, rows = x.shape[-1], prod(x.shape[:-1])
    x, x_count, x_outer, x_inner = row_strides(x)
    common = {"p_x": x, "p_weight": weight, "p_y": y, "columns": columns, "eps": eps, "x_count": x_count}
    common |= {"x_outer": x_outer, "x_inner": x_inner, "KIND": norm_type, "WEIGHTED": weight is not None}
    if columns > MAX_REGISTER_COLUMNS:
        launch_kernel(
            long_norm_kernel, (rows,), 16, device=x.device, contract=False, **common, BLOCK=LONG_ROW_BLOCK
        )
        return y
    gate, gate_count, gate_outer, gate_inner = (None, 1, 0, 0) if gate is None else row_strides(gate)
    block = triton.next_power_of_2(columns)
    tile = max(1, TILE_ELEMENTS // block)
    launch_kernel(
        norm_kernel,
        (triton.cdiv(rows, tile),),
        min(16, max(4, block // 512)),  # two 128-bit loads of bfloat16 per thread
        device=x.device,
        contract=False,
        **common,
        p_gate=gate,
        p_residual=None if residual is None else residual.contiguous(),
        rows=rows,
        gate_count=gate_count,
        gate_outer=gate_outer,
        gate_inner=gate_inner,
        scale=scale,
        GATED=gate is not None,
        ADDED=residual is not None,
        ROWS=tile,
        BLOCK=block,
    )
    return y


def norm_input_unsupported(x: Tensor, weight: Tensor | None, max_columns: int = MAX_COLUMNS) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    if x.dtype not in FLOAT_DTYPES:
        return f"x is in {x.dtype}"
    if weight is not None and (weight.dtype != torch.float32 or not weight.is_contiguous()):
        return "the weight is not float32 or not contiguous"
    return None if x.shape[-1] <= max_columns else f"a row is longer than {max_columns}"


def norm_unsupported(x: Tensor, weight: Tensor | None, _: float) -> str | None:
    return norm_input_unsupported(x, weight)


def gated_norm_unsupported(x: Tensor, gate: Tensor, weight: Tensor, _: float) -> str | None:
    return norm_input_unsupported(x, weight, MAX_REGISTER_COLUMNS) or (
        None if gate.shape == x.shape else "x and gate differ in shape"
    )


def l2_normalize_unsupported(x: Tensor) -> str | None:
    return norm_input_unsupported(x, None, MAX_REGISTER_COLUMNS)


def add_norm_unsupported(residual: Tensor, x: Tensor, norm: Norm, _: float) -> str | None:
    return norm_input_unsupported(x, norm.weight, MAX_REGISTER_COLUMNS)


@kernel("rms_norm", "triton-rows", norm_unsupported, first=True)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return launch_norm(x, weight, eps, "rms")


@kernel("layer_norm", "triton-rows", norm_unsupported, first=True)
def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, weight, eps, "layer")


@kernel("gated_rms_norm", "triton-rows", gated_norm_unsupported, first=True)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(x, weight, eps, "rms", gate=gate)


@kernel("unit", "triton-rows", l2_normalize_unsupported, first=True)
def l2_normalize(x: Tensor) -> Tensor:
    return launch_norm(x, None, 1e-6, "unit")


@kernel("add_normed", "triton-rows", add_norm_unsupported, first=True)
def add_norm(residual: Tensor, x: Tensor, norm: Norm, scale: float) -> Tensor:
    return launch_norm(x, norm.weight, norm.eps, norm.norm_type, residual=residual, scale=scale)


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    def weight(size: int) -> Tensor:
        return meta_tensor(size, dtype=torch.float32)

    for columns in (2048, 4096, 16384):
        yield f"RMS of rows of {columns}", lambda n=columns: rms_norm(meta_tensor(8, n), weight(n), 1e-5)
    yield "RMS of rows of 65536", lambda: rms_norm(meta_tensor(8, 65536), weight(65536), 1e-5)
    yield (
        "RMS of 4096, added",
        lambda: add_norm(meta_tensor(8, 4096), meta_tensor(8, 4096), Norm(weight(4096), 1e-6), 1.0),
    )
    yield (
        "RMS of heads of 128, gated",
        lambda: gated_rms_norm(meta_tensor(8, 32, 128), meta_tensor(8, 32, 128), weight(128), 1e-6),
    )

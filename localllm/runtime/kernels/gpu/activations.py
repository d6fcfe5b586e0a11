"""activation(gate) * up for rows that hold the gates first, in float32, rounded once.

silu: g sigmoid(g); gelu_tanh: g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), equal to 0.5 g (1 + tanh(...)); gelu:
0.5 g (1 + erf(g / sqrt(2))); swiglu_clamped: g sigmoid(1.702 g) (up + 1) with g <= 7, |up| <= 7.

Bytes: gate, up and the result once each.
"""

from collections.abc import Callable, Iterator

import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from localllm.runtime.kernels.gpu.launch import (
    allow_next_kernel,
    gpu_unsupported,
    launch_kernel,
    meta_tensor,
    wait_for_inputs,
)
from localllm.runtime.kernels.gpu.norms import FLOAT_DTYPES
from localllm.runtime.kernels.gpu.rounding import round_to_dtype
from localllm.runtime.kernels.registry import kernel

CLAMP_LIMIT: tl.constexpr = tl.constexpr(SWIGLU_LIMIT)
SWIGLU_SLOPE: tl.constexpr = tl.constexpr(SWIGLU_ALPHA)
BLOCK_COLUMNS = 1024  # of a row: a 128-bit load of bfloat16 per thread


@triton.jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32; NaN stays NaN"""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.where(gate > CLAMP_LIMIT, CLAMP_LIMIT, gate)
        up = tl.where(up > CLAMP_LIMIT, CLAMP_LIMIT, tl.where(up < -CLAMP_LIMIT, -CLAMP_LIMIT, up))
        return gate * tl.sigmoid(gate * SWIGLU_SLOPE) * (up + 1.0)
    elif ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "gelu")
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


@triton.jit
def gated_activation_kernel(
    p_x, p_y, columns, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = i < columns
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    gate = tl.load(p_x + row * stride + i, mask=m, other=0.0).to(tl.float32)
    up = tl.load(p_x + row * stride + columns + i, mask=m, other=0.0).to(tl.float32)
    tl.store(
        p_y + row * columns + i, round_to_dtype(apply_gate(gate, up, ACTIVATION), p_y.dtype.element_ty), mask=m
    )


def gated_activation_unsupported(x: Tensor, _: Activation) -> str | None:
    if reason := gpu_unsupported(x):
        return reason
    return None if x.dtype in FLOAT_DTYPES else f"x is in {x.dtype}"


@kernel("gated", "triton-rows", gated_activation_unsupported, first=True)
def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    x = gate_up.flatten(0, -2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    columns = x.shape[-1] // 2
    y = x.new_empty(*gate_up.shape[:-1], columns)
    if y.numel():
        grid = (len(x), triton.cdiv(columns, BLOCK_COLUMNS))
        arguments = {"p_x": x, "p_y": y, "columns": columns, "stride": x.stride(0)}
        launch_kernel(
            gated_activation_kernel,
            grid,
            4,
            device=x.device,
            **arguments,
            ACTIVATION=activation,
            BLOCK=BLOCK_COLUMNS,
        )
    return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "silu, 14336 columns", lambda: gated_activation(meta_tensor(1, 28672), "silu")
    yield "gelu_tanh, 21504 columns", lambda: gated_activation(meta_tensor(1, 43008), "gelu_tanh")
    yield "swiglu_clamped, 2880 columns", lambda: gated_activation(meta_tensor(4, 5760), "swiglu_clamped")

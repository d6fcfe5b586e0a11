"""activation(gate) * up for rows that hold gate first, in float32, rounded once.

silu: g sigmoid(g); gelu_tanh: g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), the same as 0.5 g (1 + tanh(...)); gelu:
0.5 g (1 + erf(g / sqrt(2))); swiglu_clamped: g sigmoid(1.702 g) (up + 1) with g <= 7, |up| <= 7.

Bytes: gate, up and the result once each.
"""

from collections.abc import Callable, Iterator

import triton
import triton.language as tl
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.elementwise import CLAMP, SHARPNESS
from localllm.runtime.kernels.gpu.launch import let_next_start, needs_gpu, start, wait_for_inputs
from localllm.runtime.kernels.gpu.meta import x_of
from localllm.runtime.kernels.gpu.norms import FLOATS
from localllm.runtime.kernels.gpu.rounding import rounded
from localllm.runtime.kernels.registry import kernel

MOST: tl.constexpr = tl.constexpr(CLAMP)
STEEP: tl.constexpr = tl.constexpr(SHARPNESS)
AT_ONCE = 1024  # of a row: a 128-bit load of bfloat16 a thread


@triton.jit
def gated_pair(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32; NaN stays NaN."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.where(gate > MOST, MOST, gate)
        up = tl.where(up > MOST, MOST, tl.where(up < -MOST, -MOST, up))
        return gate * tl.sigmoid(gate * STEEP) * (up + 1.0)
    elif ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(ACTIVATION == "gelu")
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


@triton.jit
def gated_rows(p_x, p_y, columns, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = i < columns
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.load(p_x + row * stride + i, mask=m, other=0.0).to(tl.float32)
    up = tl.load(p_x + row * stride + columns + i, mask=m, other=0.0).to(tl.float32)
    tl.store(p_y + row * columns + i, rounded(gated_pair(gate, up, ACTIVATION), p_y.dtype.element_ty), mask=m)


def takes(x: Tensor, _: Activation) -> str | None:
    if reason := needs_gpu(x):
        return reason
    return None if x.dtype in FLOATS else f"x is in {x.dtype}"


@kernel("gated", "triton-rows", takes, first=True)
def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    x = gate_up.flatten(0, -2)
    x = x if x.stride(-1) == 1 else x.contiguous()
    columns = x.shape[-1] // 2
    y = x.new_empty(*gate_up.shape[:-1], columns)
    if y.numel():
        grid = (len(x), triton.cdiv(columns, AT_ONCE))
        arguments = {"p_x": x, "p_y": y, "columns": columns, "stride": x.stride(0)}
        start(gated_rows, grid, 4, device=x.device, **arguments, ACTIVATION=activation, BLOCK=AT_ONCE)
    return y


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    yield "silu, 14336 columns", lambda: gated(x_of(1, 28672), "silu")
    yield "gelu_tanh, 21504 columns", lambda: gated(x_of(1, 43008), "gelu_tanh")
    yield "swiglu_clamped, 2880 columns", lambda: gated(x_of(4, 5760), "swiglu_clamped")

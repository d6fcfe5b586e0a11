"""cos and sin of position * frequency, times a magnitude: [T, 1, dim / 2] float32 each, once per step.

The product is rounded to float32, as in training. Multiples of pi / 2 are subtracted in float64, where a million
turns lose at most 1e-10, and the rest, at most pi / 4, goes into the polynomials of Cephes (Moshier 1989): exact
up to the last bits for any angle. CUDA's own cosf is as exact, but above an angle of 105,615 it branches into
local memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import allow_next_kernel, gpu_unsupported, launch_kernel, wait_for_inputs
from localllm.runtime.kernels.registry import kernel

HALF_PI: tl.constexpr = tl.constexpr(1.5707963267948966)
INVERSE_HALF_PI: tl.constexpr = tl.constexpr(0.6366197723675814)  # in one radian


@triton.jit
def cos_and_sin(angle):
    """Return cos and sin of float32 angles from 0 to 2^31."""
    exact = angle.to(tl.float64)
    quarter = (exact * INVERSE_HALF_PI + 0.5).to(tl.int32)
    x = (exact - quarter.to(tl.float64) * HALF_PI).to(tl.float32)
    z = x * x
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit(do_not_specialize=["size"])
def rope_angles_kernel(
    p_positions, p_frequencies, p_cos, p_sin, size, half, magnitude, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    frequency = tl.load(p_frequencies + i % half, mask=m, other=0.0)
    wait_for_inputs(PDL)
    allow_next_kernel(PDL)
    position = tl.load(p_positions + i // half, mask=m, other=0).to(tl.float32)
    cos, sin = cos_and_sin(position * frequency)
    tl.store(p_cos + i, cos * magnitude, mask=m)
    tl.store(p_sin + i, sin * magnitude, mask=m)


def rope_angles_unsupported(positions: Tensor, frequencies: Tensor, _: float) -> str | None:
    return gpu_unsupported(positions)


@kernel("angles", "triton-exact", rope_angles_unsupported, first=True)
def rope_angles(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    half = len(frequencies)
    cos, sin = (frequencies.new_empty(len(positions), 1, half) for _ in range(2))
    arguments: dict[str, Any] = {
        "p_positions": positions,
        "p_frequencies": frequencies,
        "p_cos": cos,
        "p_sin": sin,
    }
    arguments |= {"size": cos.numel(), "half": half, "magnitude": magnitude, "BLOCK": 128}
    if cos.numel():
        launch_kernel(
            rope_angles_kernel, (triton.cdiv(cos.numel(), 128),), 4, device=positions.device, **arguments
        )
    return cos, sin


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    def call() -> object:
        positions = torch.empty(8, dtype=torch.int64, device="meta")
        return rope_angles(positions, torch.empty(64, dtype=torch.float32, device="meta"), 1.0)

    yield "angles of 8 tokens, 64 pairs", call

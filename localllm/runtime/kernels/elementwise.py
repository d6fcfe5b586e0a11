"""The small operations between matrix products, with sums and rotations in float32 for any dtype of x."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import Activation
from localllm.runtime.kernels.cpu import elementwise
from localllm.runtime.kernels.cpu.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from localllm.runtime.kernels.registry import dispatch, kernel

CHUNK_ELEMENTS = 2**14  # below the size at which torch uses several threads
MAX_VECTOR_ELEMENTS = 64  # at least as many elements as torch's widest vectors


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    weight: float32, or None for 1
    """
    if elementwise.supports_rms_norm(x, weight):
        return elementwise.rms_norm(x, weight, eps)
    return dispatch("rms_norm", x, weight, eps)


@kernel("rms_norm", "reference")
def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(at_least_float32(x), (x.shape[-1],), weight, eps).to(x.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight (Ba et al. 2016, without a bias). weight: float32"""
    return dispatch("layer_norm", x, weight, eps)


@kernel("layer_norm", "reference")
def layer_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = at_least_float32(x)
    return F.layer_norm(wide, (x.shape[-1],), weight.to(wide.dtype), None, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate). weight: float32"""
    return dispatch("gated_rms_norm", x, gate, weight, eps)


@kernel("gated_rms_norm", "reference")
def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms_norm(at_least_float32(x), weight, eps) * silu(at_least_float32(gate))).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)"""
    return elementwise.map_elements(x, "silu") if elementwise.supports(x) else F.silu(x)


def sigmoid(x: Tensor) -> Tensor:
    return elementwise.map_elements(x, "sigmoid") if elementwise.supports(x) else torch.sigmoid(x)


def tanh(x: Tensor) -> Tensor:
    return elementwise.map_elements(x, "tanh") if elementwise.supports(x) else torch.tanh(x)


def softplus(x: Tensor) -> Tensor:
    return map_in_vectors(F.softplus, x)


def map_in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise torch function; on a CPU with whole vectors and in one thread.

    Torch's results for elements behind the last whole vector differ in their bits from those inside one, so that
    they would depend on the number of elements.
    """
    count = x.numel()
    if not x.is_cpu or (count % MAX_VECTOR_ELEMENTS == 0 and count <= CHUNK_ELEMENTS):
        return function(x)
    padded = F.pad(x.flatten(), (0, -count % MAX_VECTOR_ELEMENTS))
    return torch.cat([function(chunk) for chunk in padded.split(CHUNK_ELEMENTS)])[:count].view(x.shape)


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32"""
    return dispatch("unit", x)


@kernel("unit", "reference")
def l2_normalize_reference(x: Tensor) -> Tensor:
    return at_least_float32(x) * torch.rsqrt(at_least_float32(x).square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Apply rotary positions to the first d dimensions of each head, leaving the rest unchanged.

    x: [T, heads, head_dim]; cos, sin: [T, 1, d/2] float32. Pairs are (i, i + d/2), or adjacent if interleaved.
    """
    width = 2 * cos.shape[-1]
    is_full = width == x.shape[-1]
    unrotated = (x if is_full else x[..., :width]).float()
    a, b = unrotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else unrotated.chunk(2, -1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    joined = (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)
    return joined if is_full else torch.cat((joined, x[..., width:]), -1)


def rope_angles(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency, times the magnitude: [T, 1, dim / 2] float32 each.

    positions: [T] int64; frequencies: [dim / 2] float32, radians per position
    """
    return dispatch("angles", positions, frequencies, magnitude)


@kernel("angles", "reference")
def rope_angles_reference(positions: Tensor, frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    angle = positions[:, None, None] * frequencies
    return map_in_vectors(torch.cos, angle) * magnitude, map_in_vectors(torch.sin, angle) * magnitude


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, where gate_up [T, 2 * n] holds the gates first -> [T, n]"""
    return dispatch("gated", gate_up, activation)


def gated_activation_cpu_unsupported(gate_up: Tensor, activation: Activation) -> str | None:
    return None if elementwise.supports(gate_up) else "no kernel is compiled for it"


@kernel("gated", "cpu-numbers", gated_activation_cpu_unsupported)
def gated_activation_cpu(gate_up: Tensor, activation: Activation) -> Tensor:
    return elementwise.gated_activation(gate_up, activation)


@kernel("gated", "reference")
def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up

"""The small operations between matrix products; sums and rotations in float32 whatever the dtype of x."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on pairs (i, i + d/2). x: [T, heads, d]; cos, sin: [T, 1, d/2] float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up: [T, 2 * n] holds gate first -> [T, n]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up

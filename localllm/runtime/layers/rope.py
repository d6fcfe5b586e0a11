"""Rotary position embedding: the angles of a step, computed once for all layers that share a RopeConfig."""

import math

import torch
from torch import Tensor

from localllm.arch.config import LinearScaling, Llama3Scaling, RopeConfig


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """[dim / 2] float32, radians per position."""
    frequency = 1.0 / config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
    match config.scaling:
        case LinearScaling(factor):
            return frequency / factor
        case Llama3Scaling(factor, low, high, original):
            wavelength = 2 * math.pi / frequency
            smooth = (original / wavelength - low) / (high - low)
            return torch.lerp(frequency / factor, frequency, smooth.clamp(0, 1))
        case None:
            return frequency


class Rope:
    def __init__(self, config: RopeConfig, device: torch.device):
        self.frequencies = inverse_frequencies(config).to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos and sin, [T, 1, dim / 2] float32 each."""
        angle = positions[:, None, None] * self.frequencies
        return angle.cos(), angle.sin()

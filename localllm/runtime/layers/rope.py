"""Rotary position embedding: the angles of a step, computed once for all layers that share a RopeConfig."""

import math

import torch
from torch import Tensor

from localllm.arch.config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    PerFrequencyScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)
from localllm.runtime import kernels

Angles = tuple[Tensor, Tensor]


def inverse_frequencies(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Return radians per position, [dim / 2] float32, and the magnitude of cos and sin.

    max_len: maximum tokens per sequence, which selects one of LongRoPE's two sets.
    """
    frequency = 1.0 / config.theta ** (torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim)
    match config.scaling:
        case LinearScaling(factor):
            return frequency / factor, 1.0
        case Llama3Scaling(factor, low, high, original):
            wavelength = 2 * math.pi / frequency
            smooth = (original / wavelength - low) / (high - low)
            return torch.lerp(frequency / factor, frequency, smooth.clamp(0, 1)), 1.0
        case YarnScaling() as yarn:
            return torch.lerp(frequency, frequency / yarn.factor, yarn_ramp(config, yarn)), yarn.magnitude
        case PerFrequencyScaling(divisors):
            return frequency / torch.tensor(divisors), 1.0
        case LongScaling(short, long, original, magnitude):
            return frequency / torch.tensor(long if max_len > original else short), magnitude
        case ProportionalScaling(rotated, factor):
            return torch.where(torch.arange(config.dim // 2) < rotated, frequency / factor, 0.0), 1.0
        case None:
            return frequency, 1.0


def yarn_ramp(config: RopeConfig, yarn: YarnScaling) -> Tensor:
    """Return [dim / 2]: 0 where a frequency is kept, 1 where it is interpolated (Peng et al. 2023, section
    3.2).
    """

    def dimension(turns: float) -> float:
        """Return the dimension that makes `turns` rotations within the original context."""
        return config.dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    width = high - low or 0.001  # avoids division by zero, as in the authors' code
    return ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


class Rope:
    def __init__(self, config: RopeConfig, max_len: int, device: torch.device):
        frequencies, self.magnitude = inverse_frequencies(config, max_len)
        self.frequencies = frequencies.to(device)

    def angles(self, positions: Tensor) -> Angles:
        """Return cos and sin, [T, 1, dim / 2] float32 each. positions: [T]"""
        return kernels.rope_angles(positions, self.frequencies, self.magnitude)

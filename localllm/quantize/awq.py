"""AWQ: columns with large inputs are scaled up before rounding, and their producers scaled down.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2: with s = mean|x|^a, the exponent a of 0,
1/20, 2/20, ... whose output is closest to the original,

    L(s) = || Q(W diag(s)) diag(s)^-1 X - W X ||^2,

normalized to sqrt(max(s) * min(s)) = 1. Then each group's range is clipped to minimize its part of the output
error.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.grid import Grid, quantize_rtn, second_moments
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.inputs import InputStatistics

EXPONENTS = tuple(i / 20 for i in range(20))
MIN_MAGNITUDE = 1e-4


def search_scale(
    weights: Sequence[Tensor], inputs: InputStatistics, grid: Grid, nearest_allowed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the scale s [in] float32 with the smallest error; ones if none is better.

    weights: [out, in] each, that share these inputs; nearest_allowed: maps s to the nearest one that can be folded
    """
    samples, magnitude = inputs.samples, inputs.mean_magnitude.clamp(min=MIN_MAGNITUDE)
    best_error, best_scale = torch.inf, torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        s = nearest_allowed(normalize_scale(magnitude**exponent))
        error = 0.0
        for weight in weights:
            difference = dequantize(quantize_rtn(weight * s, grid), torch.float32) / s - weight
            error += (samples @ difference.T).square_().sum().item()
        if error < best_error:
            best_error, best_scale = error, s
    return best_scale


def normalize_scale(s: Tensor) -> Tensor:
    return s / (s.max() * s.min()).sqrt()


def quantize(weight: Tensor, inputs: InputStatistics, grid: Grid) -> QuantizedTensor:
    """Quantize with the clipping search. weight: [out, in], already scaled, like the inputs."""
    return quantize_rtn(weight, grid, second_moments(inputs.samples, grid.group))

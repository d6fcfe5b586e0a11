"""AWQ: columns that meet large inputs are scaled up before rounding, what comes before scales them down again.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", section 3.2: with s = mean|x|^a, the exponent a of
0, 1/20, 2/20, ... whose output is nearest to the original,

    L(s) = || Q(W diag(s)) diag(s)^-1 X - W X ||^2,

normed to sqrt(max(s) * min(s)) = 1. Then each group's range is cut where its part of the output's error is least.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.grid import Grid, second_moments
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import rtn
from localllm.quantize.inputs import InputStatistics

EXPONENTS = tuple(i / 20 for i in range(20))
MIN_MAGNITUDE = 1e-4


def search_scale(
    weights: Sequence[Tensor], inputs: InputStatistics, grid: Grid, nearest_allowed: Callable[[Tensor], Tensor]
) -> Tensor:
    """weights: [out, in] each, that read these inputs; nearest_allowed: takes an s to the nearest that what comes
    before
    can be divided by -> s [in] float32, ones where nothing is better."""
    rows, magnitude = inputs.samples, inputs.mean_magnitude.clamp(min=MIN_MAGNITUDE)
    best, chosen = torch.inf, torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        s = nearest_allowed(normalize_scale(magnitude**exponent))
        error = 0.0
        for weight in weights:
            off = dequantize(rtn.quantize(weight * s, grid), torch.float32) / s - weight
            error += (rows @ off.T).square_().sum().item()
        if error < best:
            best, chosen = error, s
    return chosen


def normalize_scale(s: Tensor) -> Tensor:
    return s / (s.max() * s.min()).sqrt()


def quantize(weight: Tensor, inputs: InputStatistics, grid: Grid) -> QuantizedTensor:
    """With the clipping search. weight: [out, in], scaled already, as the inputs are."""
    return rtn.quantize(weight, grid, second_moments(inputs.samples, grid.group))

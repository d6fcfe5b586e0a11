"""SmoothQuant: moves what is hard to quantize in the inputs to the weights, column by column.

Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for LLMs", section 4, equation 4:

    s_j = max|X_j|^a / max|W_j|^(1 - a),    Y = (X diag(s)^-1) (diag(s) W).

The paper uses a = 0.5 for most models; here, the a of STRENGTHS, or no smoothing, whose output is closest to the
original when inputs and weights are both rounded to INT8, inputs with a scale per token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localllm.quant.dequantize import dequantize
from localllm.quant.formats.groups import INT8_MAX
from localllm.quant.grid import Grid, quantize_rtn
from localllm.quantize.inputs import InputStatistics

STRENGTHS = (0.5, 0.3, 0.4, 0.6, 0.7, 0.8)
MIN_MAGNITUDE = 1e-5


def fake_quantize_tokens(x: Tensor) -> Tensor:
    """Round x [T, in] to INT8 with a scale per row, as in inference; float32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=MIN_MAGNITUDE**2) / INT8_MAX
    return (x / scale).round_().clamp_(-INT8_MAX, INT8_MAX) * scale


def search_scale(
    weights: Sequence[Tensor], inputs: InputStatistics, grid: Grid, nearest_allowed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the scale s [in] float32 with the smallest error; ones if none is better.

    weights: [out, in] each, that share these inputs; nearest_allowed: maps s to the nearest one that can be folded
    """
    samples, magnitude = inputs.samples, inputs.max_magnitude
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    candidates = [torch.ones_like(magnitude)]
    for a in STRENGTHS:
        s = magnitude.clamp(min=MIN_MAGNITUDE) ** a / largest.clamp(min=MIN_MAGNITUDE) ** (1 - a)
        candidates.append(nearest_allowed(torch.where((magnitude > 0) & (largest > 0), s, 1.0)))

    def error(s: Tensor) -> float:
        x, total = fake_quantize_tokens(samples / s), 0.0
        for weight in weights:
            rounded = dequantize(quantize_rtn(weight * s, grid), torch.float32)
            total += (x @ rounded.T - samples @ weight.T).square_().sum().item()
        return total

    return min(candidates, key=error)

"""Round to nearest: each weight separately, with scales of the smallest squared error. Needs no calibration."""

import torch
from torch import Tensor

from localllm.quant.grid import FittedGrid, Grid, fit, row_tiles
from localllm.quant.tensor import QuantizedTensor


def quantize(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedTensor:
    """Return q = clamp(round(w / scale) + zero). weight: [out, in], of any float dtype, converted a few rows at a
    time.

    moments: see `fit`; the scales then minimize the output error.
    """
    fitted = fit(weight, grid, moments)
    code_dtype = torch.uint8 if grid.bits == 4 else torch.int8
    codes, begin = torch.empty(weight.shape, dtype=code_dtype), 0
    for tile in row_tiles(weight):
        rows = slice(begin, begin + len(tile))
        zero = None if fitted.zero is None else fitted.zero[rows]
        codes[rows] = FittedGrid(grid, fitted.scale[rows], zero).round_weight(tile)
        begin = rows.stop
    return fitted.pack(codes)

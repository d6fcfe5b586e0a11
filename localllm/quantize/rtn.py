"""Round to nearest: each weight by itself, with scales of the least squared error. Needs no calibration."""

import torch
from torch import Tensor

from localllm.quant.grid import FittedGrid, Grid, fit, row_tiles
from localllm.quant.tensor import QuantizedTensor


def quantize(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedTensor:
    """q = clamp(round(w / scale) + zero). weight: [out, in], of any float dtype, converted a few rows at a time;
    moments: as in `fit`: the scales then have the least error of the output."""
    fitted = fit(weight, grid, moments)
    code = torch.uint8 if grid.bits == 4 else torch.int8
    codes, begin = torch.empty(weight.shape, dtype=code), 0
    for tile in row_tiles(weight):
        rows = slice(begin, begin + len(tile))
        zero = None if fitted.zero is None else fitted.zero[rows]
        codes[rows] = FittedGrid(grid, fitted.scale[rows], zero).round_weight(tile)
        begin = rows.stop
    return fitted.pack(codes)

"""Quantization grids and rounding to nearest: 2^bits codes, with a scale and optionally a zero point per group of
weights.

Fitting a grid to a matrix searches how much of each group's range is clipped: for each ratio c in CLIP_RATIOS, the
scale is c * largest / steps (symmetric) or c * (highest - lowest) / steps, and the one with the smallest error is
used, group by group. The error is the sum of squares or, if the inputs' second moments are known, the group's part
of the output error, d^T (X^T X) d with d = Q(w) - w (the clipping search of AWQ, Lin et al. 2023, section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.formats.groups import (
    INT4_MAX,
    INT4_ZERO_POINT,
    INT8_MAX,
    expand_groups,
    pack_int4,
    split_groups,
)
from localllm.quant.packing import INT4, INT8
from localllm.quant.tensor import QuantizedTensor

# Ratios of the range. Four bits gain much from clipping: the best ratio is often near 0.8. Eight bits gain little.
CLIP_RATIOS = {4: tuple(1.0 - 0.04 * i for i in range(13)), 8: (1.0, 0.97, 0.94, 0.91)}
# Scales of float16 may be subnormal: 1/127 of a small weight is below the normal range.
MIN_SCALE = {torch.float16: 2.0**-24}
TILE_ELEMENTS = 2**17  # elements that are fitted at a time, to stay in the cache: 2**19 takes twice as long


@dataclass(frozen=True)
class Grid:
    bits: int = 4  # 4 or 8
    group: int | None = 128  # columns that share a scale; None: an entire row
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32

    @property
    def format(self) -> str:
        return INT4 if self.bits == 4 else INT8

    @property
    def min_code(self) -> int:
        """Smallest code: 0 for INT4; symmetric for INT8 without zero points."""
        return 0 if self.bits == 4 else -INT8_MAX - (not self.symmetric)

    @property
    def max_code(self) -> int:
        return INT4_MAX if self.bits == 4 else INT8_MAX

    @property
    def zero_point(self) -> int:
        """The zero point if none is stored."""
        return INT4_ZERO_POINT if self.bits == 4 else 0


@dataclass(frozen=True)
class FittedGrid:
    """scale: [out, groups] in the grid's dtype; zero: [out, groups] float32, None for the grid's zero point."""

    grid: Grid
    scale: Tensor
    zero: Tensor | None

    def codes(self, steps: Tensor, zero: Tensor | float) -> Tensor:
        """Round to codes, float32. steps: weights divided by their scales"""
        return (steps + zero).round_().clamp_(self.grid.min_code, self.grid.max_code)

    def column_grid(self, number: int, columns: int) -> tuple[Tensor, Tensor | float]:
        """Return scales and zero points of one of `columns` columns, [out] float32 each."""
        group_index = number // (self.grid.group or columns)
        return self.scale[:, group_index].float(), self.grid.zero_point if self.zero is None else self.zero[
            :, group_index
        ]

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the nearest codes. weight: [out, in] -> float32 [out, in]"""
        columns = weight.shape[1]
        group = self.grid.group or columns
        zero = self.grid.zero_point if self.zero is None else expand_groups(self.zero, group, columns)
        return self.codes(weight.float() / expand_groups(self.scale.float(), group, columns), zero)

    def pack(self, codes: Tensor) -> QuantizedTensor:
        """Pack codes [out, in] of any dtype."""
        grid = self.grid
        code_dtype = torch.uint8 if grid.bits == 4 else torch.int8
        q = codes.to(code_dtype)
        parts = {"q": pack_int4(q) if grid.bits == 4 else q, "scale": self.scale}
        if self.zero is not None:
            parts["zero"] = self.zero.to(code_dtype)
        return QuantizedTensor(grid.format, (codes.shape[0], codes.shape[1]), parts, grid.group)


def quantize_rtn(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedTensor:
    """Round to nearest, each weight separately: q = clamp(round(w / scale) + zero), with fitted scales.

    weight: [out, in] of any float dtype, converted a few rows at a time; moments: see `fit`, the scales then
    minimize the output error.
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


def row_tiles(weight: Tensor) -> Iterator[Tensor]:
    """Iterate over a few rows at a time."""
    return iter(weight.split(max(1, TILE_ELEMENTS // max(1, weight.shape[1]))))


def fit(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> FittedGrid:
    """Return the scales and zero points with the smallest error.

    weight: [out, in]; moments: [groups, group, group] float32, the inputs' X^T X within each group (see
    `second_moments`), or [groups, group], their diagonals.
    """
    tiles = [
        fit_tile(split_groups(tile, grid.group or weight.shape[1]), grid, moments) for tile in row_tiles(weight)
    ]
    zero = None if grid.symmetric else torch.cat([zero for _, zero in tiles])
    return FittedGrid(grid, torch.cat([scale for scale, _ in tiles]), zero)


def fit_tile(weight: Tensor, grid: Grid, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fit a few rows. weight: [out, groups, group] float32 -> scale and zero point, [out, groups] each"""
    if grid.symmetric:
        low = high = weight.abs().amax(2)
        steps = (
            INT8_MAX if grid.bits == 8 else INT4_ZERO_POINT - 0.5
        )  # between -8 and 7: either end may be clipped
    else:  # zero is always representable: padding and pruned weights stay exact
        low, high = weight.amin(2).clamp(max=0), weight.amax(2).clamp(min=0)
        steps = grid.max_code - grid.min_code
    best = torch.full(low.shape, torch.inf)
    best_scale, best_zero = torch.ones_like(best), torch.full_like(best, grid.zero_point)
    for share in CLIP_RATIOS[grid.bits]:
        span = high if grid.symmetric else high - low
        scale = to_scale_dtype(span * (share / steps), grid.scale_dtype)
        zero = compute_zero_point(low * share, scale, grid)
        column_scale = scale.float()[..., None]
        quantized = weight * column_scale.reciprocal()
        if grid.symmetric:
            quantized.round_().clamp_(grid.min_code - grid.zero_point, grid.max_code - grid.zero_point)
        else:
            shift = zero[..., None]
            quantized.add_(shift).round_().clamp_(grid.min_code, grid.max_code).sub_(shift)
        error = weighted_error(quantized.mul_(column_scale).sub_(weight), moments)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_zero = (
            torch.where(better, scale.float(), best_scale),
            torch.where(better, zero, best_zero),
        )
    return to_scale_dtype(best_scale, grid.scale_dtype), best_zero


def compute_zero_point(low: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Return the code that represents zero."""
    if grid.symmetric:
        return torch.full_like(low, grid.zero_point)
    return (grid.min_code - low / scale.float()).round().clamp(grid.min_code, grid.max_code)


def to_scale_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the stored dtype, avoiding zero, which has no inverse."""
    return scale.clamp(min=MIN_SCALE.get(dtype, torch.finfo(dtype).tiny)).to(dtype)


def weighted_error(error: Tensor, moments: Tensor | None) -> Tensor:
    """Return the (weighted) sum of squares per group. error: [out, groups, group] -> [out, groups]"""
    if moments is None:
        return error.square_().sum(2)
    if moments.dim() == 2:
        return (error.square_() * moments).sum(2)
    weighted = torch.bmm(error.transpose(0, 1), moments).transpose(0, 1)
    return weighted.mul_(error).sum(2)


def second_moments(inputs: Tensor, group: int | None) -> Tensor:
    """Return X^T X within each group. inputs: [rows, in] -> [groups, group, group] float32"""
    groups = split_groups(inputs, group or inputs.shape[1]).transpose(0, 1)  # [groups, rows, group]
    return torch.bmm(groups.transpose(1, 2), groups)

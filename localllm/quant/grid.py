"""The numbers that a group of weights may become: 2^bits codes, a scale and maybe a zero point a group.

Fitting a grid to a matrix is a search over how much of each group's range is cut off: for c of SHARES the scale is
c * largest / steps (symmetric) or c * (highest - lowest) / steps, and the one with the least error is kept, group
by group. The error is the sum of squares, or, where the inputs' second moments are known, the group's part of the
output's error, d^T (X^T X) d with d = Q(w) - w (the clipping search of AWQ, Lin et al. 2023, section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.formats import int4, int8
from localllm.quant.formats.groups import expand_groups, split_groups
from localllm.quant.tensor import QuantizedTensor

# Of the range. Four bits gain much from cutting: the best share is often near 0.8. Eight bits gain little.
CLIP_RATIOS = {4: tuple(1.0 - 0.04 * i for i in range(13)), 8: (1.0, 0.97, 0.94, 0.91)}
# Scales of float16 go down to its subnormal numbers: 1/127 of a small weight lies below the others.
MIN_SCALE = {torch.float16: 2.0**-24}
TILE_ELEMENTS = (
    2**17
)  # elements that are fitted at a time, so that they stay in the cache: 2**19 takes twice as long


@dataclass(frozen=True)
class Grid:
    bits: int = 4  # 4 or 8
    group: int | None = 128  # neighbours in a row that share a scale; None: a whole row
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32

    @property
    def format(self) -> str:
        return int4.INT4_FORMAT if self.bits == 4 else int8.INT8_FORMAT

    @property
    def min_code(self) -> int:
        """Code; INT4's begin at 0, INT8's without zero points are symmetric."""
        return 0 if self.bits == 4 else -int8.INT8_MAX - (not self.symmetric)

    @property
    def max_code(self) -> int:
        return int4.INT4_MAX if self.bits == 4 else int8.INT8_MAX

    @property
    def zero_point(self) -> int:
        """The zero point where none is stored."""
        return int4.INT4_ZERO_POINT if self.bits == 4 else 0


@dataclass(frozen=True)
class FittedGrid:
    """scale: [out, groups] in the grid's dtype; zero: [out, groups] float32, None where it is the middle."""

    grid: Grid
    scale: Tensor
    zero: Tensor | None

    def codes(self, steps: Tensor, zero: Tensor | float) -> Tensor:
        """steps: numbers divided by their scales -> float32 codes"""
        return (steps + zero).round_().clamp_(self.grid.min_code, self.grid.max_code)

    def column_grid(self, number: int, columns: int) -> tuple[Tensor, Tensor | float]:
        """The scales and zero points of one column of so many, [out] float32 each."""
        place = number // (self.grid.group or columns)
        return self.scale[:, place].float(), self.grid.zero_point if self.zero is None else self.zero[:, place]

    def round_weight(self, weight: Tensor) -> Tensor:
        """The nearest codes. weight: [out, in] -> float32 [out, in]"""
        columns = weight.shape[1]
        group = self.grid.group or columns
        zero = self.grid.zero_point if self.zero is None else expand_groups(self.zero, group, columns)
        return self.codes(weight.float() / expand_groups(self.scale.float(), group, columns), zero)

    def pack(self, codes: Tensor) -> QuantizedTensor:
        """codes: [out, in], of any dtype"""
        grid = self.grid
        code = torch.uint8 if grid.bits == 4 else torch.int8
        q = codes.to(code)
        parts = {"q": int4.pack_int4(q) if grid.bits == 4 else q, "scale": self.scale}
        if self.zero is not None:
            parts["zero"] = self.zero.to(code)
        return QuantizedTensor(grid.format, (codes.shape[0], codes.shape[1]), parts, grid.group)


def row_tiles(weight: Tensor) -> Iterator[Tensor]:
    """A few rows at a time."""
    return iter(weight.split(max(1, TILE_ELEMENTS // max(1, weight.shape[1]))))


def fit(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> FittedGrid:
    """weight: [out, in]; moments: [groups, group, group] float32, the inputs' X^T X within each group (see
    `moments_of`), or [groups, group], their diagonals -> the scales and zero points of the least error."""
    found = [
        fit_tile(split_groups(tile, grid.group or weight.shape[1]), grid, moments) for tile in row_tiles(weight)
    ]
    zero = None if grid.symmetric else torch.cat([zero for _, zero in found])
    return FittedGrid(grid, torch.cat([scale for scale, _ in found]), zero)


def fit_tile(weight: Tensor, grid: Grid, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight: [out, groups, group] float32 -> scale and zero point, [out, groups] each"""
    if grid.symmetric:
        low = high = weight.abs().amax(2)
        steps = (
            int8.INT8_MAX if grid.bits == 8 else int4.INT4_ZERO_POINT - 0.5
        )  # between -8 and 7: either end may be cut
    else:  # zero is always one of the numbers: padding and pruned weights stay exact
        low, high = weight.amin(2).clamp(max=0), weight.amax(2).clamp(min=0)
        steps = grid.max_code - grid.min_code
    best = torch.full(low.shape, torch.inf)
    chosen, origin = torch.ones_like(best), torch.full_like(best, grid.zero_point)
    for share in CLIP_RATIOS[grid.bits]:
        span = high if grid.symmetric else high - low
        scale = to_scale_dtype(span * (share / steps), grid.scale_dtype)
        zero = compute_zero_point(low * share, scale, grid)
        wide = scale.float()[..., None]
        tried = weight * wide.reciprocal()
        if grid.symmetric:
            tried.round_().clamp_(grid.min_code - grid.zero_point, grid.max_code - grid.zero_point)
        else:
            shift = zero[..., None]
            tried.add_(shift).round_().clamp_(grid.min_code, grid.max_code).sub_(shift)
        error = weighted_error(tried.mul_(wide).sub_(weight), moments)
        better = error < best
        best = torch.where(better, error, best)
        chosen, origin = torch.where(better, scale.float(), chosen), torch.where(better, zero, origin)
    return to_scale_dtype(chosen, grid.scale_dtype), origin


def compute_zero_point(low: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The code of zero."""
    if grid.symmetric:
        return torch.full_like(low, grid.zero_point)
    return (grid.min_code - low / scale.float()).round().clamp(grid.min_code, grid.max_code)


def to_scale_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that it is stored in, and never zero, whose inverse is infinite."""
    return scale.clamp(min=MIN_SCALE.get(dtype, torch.finfo(dtype).tiny)).to(dtype)


def weighted_error(error: Tensor, moments: Tensor | None) -> Tensor:
    """error: [out, groups, group] -> [out, groups]"""
    if moments is None:
        return error.square_().sum(2)
    if moments.dim() == 2:
        return (error.square_() * moments).sum(2)
    felt = torch.bmm(error.transpose(0, 1), moments).transpose(0, 1)
    return felt.mul_(error).sum(2)


def second_moments(inputs: Tensor, group: int | None) -> Tensor:
    """inputs: [rows, in] -> [groups, group, group] float32, X^T X within each group"""
    cut = split_groups(inputs, group or inputs.shape[1]).transpose(0, 1)  # [groups, rows, group]
    return torch.bmm(cut.transpose(1, 2), cut)

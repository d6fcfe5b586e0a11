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
from localllm.quant.formats.groups import grouped, spread
from localllm.quant.tensor import QuantizedTensor

# Of the range. Four bits gain much from cutting: the best share is often near 0.8. Eight bits gain little.
SHARES = {4: tuple(1.0 - 0.04 * i for i in range(13)), 8: (1.0, 0.97, 0.94, 0.91)}
# Scales of float16 go down to its subnormal numbers: 1/127 of a small weight lies below the others.
SMALLEST = {torch.float16: 2.0**-24}
TILE = 2**17  # elements that are fitted at a time, so that they stay in the cache: 2**19 takes twice as long


@dataclass(frozen=True)
class Grid:
    bits: int = 4  # 4 or 8
    group: int | None = 128  # neighbours in a row that share a scale; None: a whole row
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32

    @property
    def format(self) -> str:
        return int4.FORMAT if self.bits == 4 else int8.FORMAT

    @property
    def lowest(self) -> int:
        """Code; INT4's begin at 0, INT8's without zero points are symmetric."""
        return 0 if self.bits == 4 else -int8.LARGEST - (not self.symmetric)

    @property
    def highest(self) -> int:
        return int4.LARGEST if self.bits == 4 else int8.LARGEST

    @property
    def middle(self) -> int:
        """The zero point where none is stored."""
        return int4.MIDDLE if self.bits == 4 else 0


@dataclass(frozen=True)
class Fitted:
    """scale: [out, groups] in the grid's dtype; zero: [out, groups] float32, None where it is the middle."""

    grid: Grid
    scale: Tensor
    zero: Tensor | None

    def codes(self, steps: Tensor, zero: Tensor | float) -> Tensor:
        """steps: numbers divided by their scales -> float32 codes"""
        return (steps + zero).round_().clamp_(self.grid.lowest, self.grid.highest)

    def column(self, number: int, columns: int) -> tuple[Tensor, Tensor | float]:
        """The scales and zero points of one column of so many, [out] float32 each."""
        place = number // (self.grid.group or columns)
        return self.scale[:, place].float(), self.grid.middle if self.zero is None else self.zero[:, place]

    def rounded(self, weight: Tensor) -> Tensor:
        """The nearest codes. weight: [out, in] -> float32 [out, in]"""
        columns = weight.shape[1]
        group = self.grid.group or columns
        zero = self.grid.middle if self.zero is None else spread(self.zero, group, columns)
        return self.codes(weight.float() / spread(self.scale.float(), group, columns), zero)

    def packed(self, codes: Tensor) -> QuantizedTensor:
        """codes: [out, in], of any dtype"""
        grid = self.grid
        code = torch.uint8 if grid.bits == 4 else torch.int8
        q = codes.to(code)
        parts = {"q": int4.pack(q) if grid.bits == 4 else q, "scale": self.scale}
        if self.zero is not None:
            parts["zero"] = self.zero.to(code)
        return QuantizedTensor(grid.format, (codes.shape[0], codes.shape[1]), parts, grid.group)


def tiles(weight: Tensor) -> Iterator[Tensor]:
    """A few rows at a time."""
    return iter(weight.split(max(1, TILE // max(1, weight.shape[1]))))


def fit(weight: Tensor, grid: Grid, moments: Tensor | None = None) -> Fitted:
    """weight: [out, in]; moments: [groups, group, group] float32, the inputs' X^T X within each group (see
    `moments_of`), or [groups, group], their diagonals -> the scales and zero points of the least error."""
    found = [fit_tile(grouped(tile, grid.group or weight.shape[1]), grid, moments) for tile in tiles(weight)]
    zero = None if grid.symmetric else torch.cat([zero for _, zero in found])
    return Fitted(grid, torch.cat([scale for scale, _ in found]), zero)


def fit_tile(weight: Tensor, grid: Grid, moments: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight: [out, groups, group] float32 -> scale and zero point, [out, groups] each"""
    if grid.symmetric:
        low = high = weight.abs().amax(2)
        steps = int8.LARGEST if grid.bits == 8 else int4.MIDDLE - 0.5  # between -8 and 7: either end may be cut
    else:  # zero is always one of the numbers: padding and pruned weights stay exact
        low, high = weight.amin(2).clamp(max=0), weight.amax(2).clamp(min=0)
        steps = grid.highest - grid.lowest
    best = torch.full(low.shape, torch.inf)
    chosen, origin = torch.ones_like(best), torch.full_like(best, grid.middle)
    for share in SHARES[grid.bits]:
        span = high if grid.symmetric else high - low
        scale = representable(span * (share / steps), grid.scale_dtype)
        zero = origin_of(low * share, scale, grid)
        wide = scale.float()[..., None]
        tried = weight * wide.reciprocal()
        if grid.symmetric:
            tried.round_().clamp_(grid.lowest - grid.middle, grid.highest - grid.middle)
        else:
            shift = zero[..., None]
            tried.add_(shift).round_().clamp_(grid.lowest, grid.highest).sub_(shift)
        error = measured(tried.mul_(wide).sub_(weight), moments)
        better = error < best
        best = torch.where(better, error, best)
        chosen, origin = torch.where(better, scale.float(), chosen), torch.where(better, zero, origin)
    return representable(chosen, grid.scale_dtype), origin


def origin_of(low: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The code of zero."""
    if grid.symmetric:
        return torch.full_like(low, grid.middle)
    return (grid.lowest - low / scale.float()).round().clamp(grid.lowest, grid.highest)


def representable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that it is stored in, and never zero, whose inverse is infinite."""
    return scale.clamp(min=SMALLEST.get(dtype, torch.finfo(dtype).tiny)).to(dtype)


def measured(error: Tensor, moments: Tensor | None) -> Tensor:
    """error: [out, groups, group] -> [out, groups]"""
    if moments is None:
        return error.square_().sum(2)
    if moments.dim() == 2:
        return (error.square_() * moments).sum(2)
    felt = torch.bmm(error.transpose(0, 1), moments).transpose(0, 1)
    return felt.mul_(error).sum(2)


def moments_of(inputs: Tensor, group: int | None) -> Tensor:
    """inputs: [rows, in] -> [groups, group, group] float32, X^T X within each group"""
    cut = grouped(inputs, group or inputs.shape[1]).transpose(0, 1)  # [groups, rows, group]
    return torch.bmm(cut.transpose(1, 2), cut)

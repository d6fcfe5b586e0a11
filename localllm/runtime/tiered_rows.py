"""The tensors behind `tiers.py`: a cache's rows on the device, and in pinned memory those of blocks put aside.

Copies are asked of the device and not waited for. It does them in the order of its other work, so a block may be
written to by the step that follows its copy, and the host, which never reads what is aside, need not know when.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.runtime.tiers import Run

PIECE = 64  # blocks aside that are allocated together, when the first of them is needed: to pin memory takes time


class TieredRows:
    """rows: [slots, ...] on the device, those of `blocks` blocks first. Blocks with higher numbers are aside."""

    def __init__(self, rows: Tensor, blocks: int, block_size: int):
        self.rows = rows
        self.block_size = block_size
        self.blocks = blocks
        self.aside: dict[int, Tensor] = {}

    def copy(self, run: Run) -> None:
        """Within a tier or between the two."""
        source, target, count = run
        while count:
            read, written = self.begin_at(source), self.begin_at(target)
            some = min(count * self.block_size, len(read), len(written))
            written[:some].copy_(read[:some], non_blocking=True)
            blocks = some // self.block_size
            source, target, count = source + blocks, target + blocks, count - blocks

    def begin_at(self, block: int) -> Tensor:
        """Its rows, and those of the blocks behind it that lie in one piece with it."""
        if block < self.blocks:
            return self.rows[block * self.block_size :]
        piece, inside = divmod(block - self.blocks, PIECE)
        if piece not in self.aside:
            shape = (PIECE * self.block_size, *self.rows.shape[1:])
            self.aside[piece] = torch.empty(shape, dtype=self.rows.dtype, pin_memory=self.rows.is_cuda)
        return self.aside[piece][inside * self.block_size :]


def tiers(rows: Iterable[Tensor | None], blocks: int, block_size: int) -> list[TieredRows]:
    return [TieredRows(each, blocks, block_size) for each in rows if each is not None]

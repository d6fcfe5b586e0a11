"""The tensors behind `tiers.py`: a cache's rows on the device, and in pinned memory those of blocks put aside.

Copies are asked of the device and not waited for. It does them in the order of its other work, so a block may be
written to by the step that follows its copy, and the host, which never reads what is aside, need not know when.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.runtime.kv_cache.tiers import CopyRun

HOST_CHUNK_BLOCKS = (
    64  # blocks aside that are allocated together, when the first of them is needed: to pin memory takes time
)


class TieredTensor:
    """on_device: [slots, ...] on the device, those of `device_blocks` blocks first. Blocks with higher numbers
    are aside."""

    def __init__(self, on_device: Tensor, device_blocks: int, block_size: int):
        self.on_device = on_device
        self.block_size = block_size
        self.device_blocks = device_blocks
        self.host_chunks: dict[int, Tensor] = {}

    def copy(self, run: CopyRun) -> None:
        """Within a tier or between the two."""
        source, target, count = run
        while count:
            read, written = self.slots_from(source), self.slots_from(target)
            some = min(count * self.block_size, len(read), len(written))
            written[:some].copy_(read[:some], non_blocking=True)
            blocks = some // self.block_size
            source, target, count = source + blocks, target + blocks, count - blocks

    def slots_from(self, block: int) -> Tensor:
        """Its rows, and those of the blocks behind it that lie in one piece with it."""
        if block < self.device_blocks:
            return self.on_device[block * self.block_size :]
        piece, inside = divmod(block - self.device_blocks, HOST_CHUNK_BLOCKS)
        if piece not in self.host_chunks:
            shape = (HOST_CHUNK_BLOCKS * self.block_size, *self.on_device.shape[1:])
            self.host_chunks[piece] = torch.empty(
                shape, dtype=self.on_device.dtype, pin_memory=self.on_device.is_cuda
            )
        return self.host_chunks[piece][inside * self.block_size :]


def tiered_tensors(tensors: Iterable[Tensor | None], blocks: int, block_size: int) -> list[TieredTensor]:
    return [TieredTensor(each, blocks, block_size) for each in tensors if each is not None]

"""A GGUF file's tensors, mapped: plain numbers as they are, blocks as packed rows.

Nothing is copied but the rows of q and k whose order is undone.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.quant.formats.gguf import PLAIN


class GGUFTensors:
    """The mapping is private and writable, as torch knows no read-only tensors. Nobody writes to it."""

    def __init__(self, file: Path):
        with file.open("rb") as stream:
            self.mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.content = torch.frombuffer(self.mapping, dtype=torch.uint8)  # [bytes of the file]

    def read(self, entry: TensorHeader) -> Tensor:
        """Plain: in its dtype and shape. Packed: uint8 [..., bytes of a row]."""
        assert entry.offset is not None
        raw = self.content[entry.offset : entry.offset + entry.nbytes]
        plain = PLAIN.get(entry.dtype.lower())
        tensor = raw.view(plain).view(entry.shape) if plain else raw.view(*entry.shape[:-1], -1)
        if entry.heads is None:
            return tensor
        return tensor.index_select(0, half_apart(*entry.heads, len(tensor)))

    def let_go(self) -> None:
        """What was read leaves this process; what is wanted again comes from the system's cache of the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


def half_apart(heads: int, size: int, rows: int) -> Tensor:
    """Which stored row stands where: of each head the even ones, then the odd ones; rows after the heads stay."""
    order = torch.arange(rows)
    turned = order[: heads * size].view(heads, -1, 2).transpose(1, 2).flatten()
    return torch.cat((turned, order[heads * size :]))

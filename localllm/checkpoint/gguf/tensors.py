"""A GGUF file's tensors, mapped: plain numbers as they are, blocks as packed rows.

Nothing is copied but the rows of q and k whose order is undone.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.stored import decode_tensor


class GGUFFile:
    """The mapping is private and writable, as torch knows no read-only tensors. Nobody writes to it."""

    def __init__(self, file: Path):
        with file.open("rb") as stream:
            self.mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.content = torch.frombuffer(self.mapping, dtype=torch.uint8)  # [bytes of the file]

    def read(self, entry: TensorHeader) -> Tensor:
        """Plain: in its dtype and shape. Packed: uint8 [..., bytes of a row]."""
        return decode_tensor(self.content[entry.begin : entry.begin + entry.nbytes], entry)

    def release(self) -> None:
        """What was read leaves this process; what is wanted again comes from the system's cache of the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

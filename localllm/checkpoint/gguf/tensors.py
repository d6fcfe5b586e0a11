"""A GGUF file's tensors, mapped: dense tensors as stored, blocks as packed rows.

Only the reordered rows of q and k are copied.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.stored import decode_tensor


class GGUFFile:
    """A GGUF file's private mapping, writable because torch has no read-only tensors; it is never written to."""

    def __init__(self, file: Path):
        with file.open("rb") as stream:
            self.mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.content = torch.frombuffer(self.mapping, dtype=torch.uint8)  # [bytes of the file]

    def read(self, entry: TensorHeader) -> Tensor:
        """Return a tensor. Dense: in its dtype and shape; packed: uint8 [..., bytes of a row]"""
        return decode_tensor(self.content[entry.begin : entry.begin + entry.nbytes], entry)

    def release(self) -> None:
        """Drop the pages that were read from this process; they are read again from the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

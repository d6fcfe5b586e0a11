"""Stores a model's logits in a temporary file, for comparing two models that do not fit into memory together.

The file replaces the first model while the second computes. The logits are stored exactly.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from localllm.errors import DiskFull
from localllm.files import explain_disk_errors
from localllm.formatting import format_bytes
from localllm.quality.measure import LogitsFunction
from localllm.quality.text import Windows

LOGIT_BYTES = 4  # per logit


@contextmanager
def open_logits_file(folder: Path, needed: int) -> Iterator["LogitsFile"]:
    """Open a file that is removed at the end, even after a crash. needed: bytes, see `logits_bytes`. Raises
    DiskFull if fewer are free.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(
            f"the logits of one model take {format_bytes(needed)} in {folder}, "
            f"which has {format_bytes(free)} free",
            "give fewer --tokens, or free memory for both models at once",
        )
    with tempfile.TemporaryFile(dir=folder, prefix="logits-") as file:
        yield LogitsFile(file, folder)


class LogitsFile:
    """A `measure.LogitsFunction` for the recorded windows."""

    def __init__(self, file: IO[bytes], folder: Path):
        self.file = file
        self.folder = folder  # containing the file, for error messages
        # Offset and shape of each piece, by window.
        self.offsets: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}

    def record(self, logits: LogitsFunction, windows: Windows) -> None:
        """Compute and store the logits of all windows. Raises DiskFull if the disk becomes full."""
        for ids in windows.ids:
            pieces = self.offsets[ids] = []
            for piece in logits(ids):
                pieces.append((self.file.tell(), tuple(piece.shape)))
                with explain_disk_errors(self.folder):
                    self.file.write(piece.float().cpu().contiguous().numpy().data)

    def __call__(self, ids: Sequence[int]) -> Iterator[Tensor]:
        for offset, shape in self.offsets[tuple(ids)]:
            self.file.seek(offset)
            content = self.file.read(torch.Size(shape).numel() * LOGIT_BYTES)
            yield torch.frombuffer(bytearray(content), dtype=torch.float32).view(shape)


def logits_bytes(windows: Windows, vocab: int) -> int:
    return windows.tokens * vocab * LOGIT_BYTES

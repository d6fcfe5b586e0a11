"""The input of a batch, read line by line and never as a whole. Knows nothing of what a line says."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from localllm.batch.lines import MOST_BYTES

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Contents:
    """What is known of a file before its first line is answered."""

    size: int  # bytes
    sha256: str
    lines: int  # that are not empty


def contents_of(file: BinaryIO) -> Contents:
    """Reads all of it once and goes back to its start."""
    digest = hashlib.sha256()
    lines = sum(1 for _ in lines_of(file, digest.update))
    size = file.tell()
    file.seek(0, os.SEEK_SET)
    return Contents(size, digest.hexdigest(), lines)


def lines_of(file: BinaryIO, look: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1; of one longer than MOST_BYTES its beginning, which
    is longer, too. look: is shown all bytes on the way."""
    number, begins = 0, True
    for piece in iter(partial(file.readline, MOST_BYTES + 1), b""):
        look(piece)
        if begins:
            number += 1
            text = piece.removeprefix(BOM) if number == 1 else piece
            if text.strip():
                yield number, text
        begins = piece.endswith(b"\n")

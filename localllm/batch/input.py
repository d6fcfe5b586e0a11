"""The input of a batch, read line by line and never as a whole. Knows nothing of what a line says."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from localllm.batch.lines import MAX_LINE_BYTES

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputContents:
    """What is known of a file before its first line is answered."""

    size_bytes: int  # bytes
    sha256: str
    line_count: int  # that are not empty


def read_contents(file: BinaryIO) -> InputContents:
    """Reads all of it once and goes back to its start."""
    digest = hashlib.sha256()
    lines = sum(1 for _ in iter_lines(file, digest.update))
    size = file.tell()
    file.seek(0, os.SEEK_SET)
    return InputContents(size, digest.hexdigest(), lines)


def iter_lines(file: BinaryIO, on_bytes: Callable[[bytes], object] = len) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number from 1; a line longer than MAX_LINE_BYTES is cut just
    beyond
    that length. on_bytes: called with all bytes as they are read."""
    number, begins = 0, True
    for piece in iter(partial(file.readline, MAX_LINE_BYTES + 1), b""):
        on_bytes(piece)
        if begins:
            number += 1
            text = piece.removeprefix(BOM) if number == 1 else piece
            if text.strip():
                yield number, text
        begins = piece.endswith(b"\n")

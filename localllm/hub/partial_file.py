"""A partially downloaded file that records its own progress, so that the process may be killed at any byte.

    [ data, `size` bytes, with holes ][ a counter per part: its downloaded bytes ][ trailer ]

A counter is written after the bytes that it counts, so it never exceeds them. The trailer, written first,
identifies the format. When all parts are complete, the tail is truncated: a file of exactly `size` bytes is
complete and only remains to be verified.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 16 * 2**20  # requested at a time
COUNTER = struct.Struct("<Q")
TRAILER = struct.Struct("<16sQQ")  # magic, size of the file, size of a part
MAGIC = b"localllm partial"
READ_BYTES = 2**20
PARTIAL_SUFFIX = ".localllm-part"


@dataclass
class Part:
    """Bytes `begin` to `end` of the file, of which the first `done` have been downloaded."""

    index: int
    begin: int
    end: int
    done: int

    @property
    def missing(self) -> int:
        return self.end - self.begin - self.done


class PartialFile:
    """Open or create a partial file, in one process at a time. Several threads may write, each to its own part."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # minus the umask
        try:
            self.parts = read_progress(self.file, size) or self._begin()
        except OSError:
            self.close()
            raise

    def _begin(self) -> list[Part]:
        parts = split_parts(self.size)
        tail = COUNTER.size * len(parts)
        os.ftruncate(self.file, 0)
        os.ftruncate(self.file, self.size + tail + TRAILER.size)
        self._write(TRAILER.pack(MAGIC, self.size, PART_BYTES), self.size + tail)
        return parts

    @property
    def done(self) -> int:
        """Number of downloaded bytes."""
        return sum(part.done for part in self.parts)

    def write(self, part: Part, content: bytes) -> None:
        """Write the next bytes of a part."""
        self._write(content, part.begin + part.done)
        part.done += len(content)
        self._write(COUNTER.pack(part.done), self.size + COUNTER.size * part.index)

    def read(self, part: Part) -> Iterator[bytes]:
        """Yield the bytes of a complete part."""
        for offset in range(part.begin, part.end, READ_BYTES):
            yield os.pread(self.file, min(READ_BYTES, part.end - offset), offset)

    def finish(self, target: Path) -> None:
        """Move the complete file to `target`, after flushing it to the disk."""
        os.ftruncate(self.file, self.size)
        os.fsync(self.file)
        os.replace(self.path, target)

    def discard(self) -> None:
        """Discard all downloaded bytes."""
        self.parts = self._begin()

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, content: bytes, offset: int) -> None:
        while content:
            written = os.pwrite(self.file, content, offset)
            content, offset = content[written:], offset + written


def split_parts(size: int) -> list[Part]:
    begins = range(0, size, PART_BYTES)
    return [Part(i, begin, min(begin + PART_BYTES, size), 0) for i, begin in enumerate(begins)]


def read_progress(file: int, size: int) -> list[Part] | None:
    """Return the parts of an open file for `size` bytes of data, or None if it is not a partial file of that
    size."""
    parts, current_size = split_parts(size), os.fstat(file).st_size
    counters = COUNTER.size * len(parts)
    if current_size == size:
        for part in parts:
            part.done = part.missing
        return parts
    tail = os.pread(file, counters + TRAILER.size, size)
    if current_size != size + len(tail) or tail[counters:] != TRAILER.pack(MAGIC, size, PART_BYTES):
        return None
    for part, [done] in zip(parts, COUNTER.iter_unpack(tail[:counters]), strict=True):
        part.done = min(done, part.missing)
    return parts


def downloaded_bytes(path: Path, size: int) -> int:
    """Return how many bytes of a file an earlier run or another process has downloaded. size: of the whole
    file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return sum(part.done for part in read_progress(file, size) or [])
    finally:
        os.close(file)

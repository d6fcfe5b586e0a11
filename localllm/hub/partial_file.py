"""A file of which some parts are here. The file keeps its own score, so that a process may be killed at any byte.

    [ the file's data, size bytes, with holes ][ a counter a part: bytes of it that are here ][ mark ]

A counter is written after the bytes that it counts, so it never says more than is there; the mark is written first
of all and tells a file of ours from anything else. When all parts are here the tail is cut off: a file of exactly
`size` bytes is whole, and only has to be verified.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PART_BYTES = 16 * 2**20  # what one request asks for
COUNTER = struct.Struct("<Q")
TRAILER = struct.Struct("<16sQQ")  # name, size of the file, size of a part
MAGIC = b"localllm partial"
READ_BYTES = 2**20
PARTIAL_SUFFIX = ".localllm-part"


@dataclass
class Part:
    """Bytes `begin` to `end` of the file, of which the first `done` are here."""

    index: int
    begin: int
    end: int
    done: int

    @property
    def missing(self) -> int:
        return self.end - self.begin - self.done


class PartialFile:
    """Opened, or made, for one process at a time. Parts may be written by several threads, each part by one."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self.size = size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # less the umask
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
        """Bytes that are here."""
        return sum(part.done for part in self.parts)

    def write(self, part: Part, content: bytes) -> None:
        """The next bytes of a part."""
        self._write(content, part.begin + part.done)
        part.done += len(content)
        self._write(COUNTER.pack(part.done), self.size + COUNTER.size * part.index)

    def read(self, part: Part) -> Iterator[bytes]:
        for at in range(part.begin, part.end, READ_BYTES):
            yield os.pread(self.file, min(READ_BYTES, part.end - at), at)

    def finish(self, target: Path) -> None:
        """Give the whole file its name, on the disk before anyone can see it."""
        os.ftruncate(self.file, self.size)
        os.fsync(self.file)
        os.replace(self.path, target)

    def discard(self) -> None:
        """Forget all that is here."""
        self.parts = self._begin()

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, content: bytes, at: int) -> None:
        while content:
            written = os.pwrite(self.file, content, at)
            content, at = content[written:], at + written


def split_parts(size: int) -> list[Part]:
    begins = range(0, size, PART_BYTES)
    return [Part(i, begin, min(begin + PART_BYTES, size), 0) for i, begin in enumerate(begins)]


def read_progress(file: int, size: int) -> list[Part] | None:
    """The parts of an open file that is to have `size` bytes; None if it is not a partial one of that size."""
    parts, here = split_parts(size), os.fstat(file).st_size
    counters = COUNTER.size * len(parts)
    if here == size:
        for part in parts:
            part.done = part.missing
        return parts
    tail = os.pread(file, counters + TRAILER.size, size)
    if here != size + len(tail) or tail[counters:] != TRAILER.pack(MAGIC, size, PART_BYTES):
        return None
    for part, [done] in zip(parts, COUNTER.iter_unpack(tail[:counters]), strict=True):
        part.done = min(done, part.missing)
    return parts


def present_bytes(path: Path, size: int) -> int:
    """How much of a file of this size an earlier run left behind, or another process has by now."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return sum(part.done for part in read_progress(file, size) or [])
    finally:
        os.close(file)

"""Where the lines of a batch go: a file that a later run goes on with, or a stream.

A file is appended to in whole lines, so that a process may be killed at any byte: what a later run finds is whole
lines and at most the beginning of one, which it cuts off. Knows nothing of what a line says.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from localllm.batch.lines import MAX_LINE_BYTES
from localllm.errors import UsageError
from localllm.files import explain_disk_errors

SYNC_EVERY_S = 1.0


class OutputStream:
    """Stdout, a pipe, a device: what went there is gone."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def write(self, lines: bytes) -> None:
        """All of it: the system may take less at once."""
        left = memoryview(lines)
        while left:
            left = left[os.write(self.descriptor, left) :]

    def close(self) -> None:
        """The descriptor is its owner's."""


class OutputFile(OutputStream):
    """A file, for this process alone while it is open."""

    def __init__(self, path: Path):
        """Raises UsageError where another process writes it, or nothing can be written there."""
        self.path = path
        self.last_sync = time.monotonic()
        with explain_disk_errors(path.parent, "name a file that can"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except (FileNotFoundError, IsADirectoryError) as error:
                raise UsageError(f"{path} cannot be written ({error.strerror})", "name a file that can") from None
        super().__init__(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"another process is writing {path}", "wait for it, or name another file") from None

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def complete_lines(self) -> Iterator[bytes]:
        """Those that are there; the end of the file is where the last of them ends once all have been read."""
        end = 0
        with open(self.descriptor, "rb", closefd=False) as file:
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                end += len(line)
                yield line
            if len(line) == MAX_LINE_BYTES:
                raise UsageError(f"{self.path} has a line that no batch writes", "name another file")
        os.ftruncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)

    def write(self, lines: bytes) -> None:
        """Raises DiskFull. What a full disk took of a line is cut off by the run that goes on."""
        with explain_disk_errors(self.path.parent, resumable=True):
            super().write(lines)
            if time.monotonic() - self.last_sync >= SYNC_EVERY_S:
                os.fsync(self.descriptor)
                self.last_sync = time.monotonic()

    def close(self) -> None:
        with explain_disk_errors(self.path.parent, resumable=True):
            os.fsync(self.descriptor)
        os.close(self.descriptor)


def is_stream(path: Path) -> bool:
    """Is it there, and neither file nor folder?"""
    return path.exists() and not path.is_file() and not path.is_dir()

"""The destination of a batch's output lines: a file that a later run can resume, or a stream.

Whole lines are appended to a file, so that a process may be killed at any byte: a later run finds complete lines
and at most one partial line, which it removes. Independent of the lines' contents.
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
    """Stdout, a pipe, or a device: output cannot be read back."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def write(self, lines: bytes) -> None:
        """Write all of it, since the system may accept less at once."""
        remaining = memoryview(lines)
        while remaining:
            remaining = remaining[os.write(self.descriptor, remaining) :]

    def close(self) -> None:
        """Leave the descriptor open: it belongs to the caller."""


class OutputFile(OutputStream):
    """A file, locked by this process while it is open."""

    def __init__(self, path: Path):
        """Raises UsageError if another process is writing it, or it cannot be written."""
        self.path = path
        self.last_sync = time.monotonic()
        with explain_disk_errors(path.parent, "use a file that can"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except (FileNotFoundError, IsADirectoryError) as error:
                raise UsageError(f"{path} cannot be written ({error.strerror})", "use a file that can") from None
        super().__init__(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"another process is writing {path}", "wait for it, or use another file") from None

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def complete_lines(self) -> Iterator[bytes]:
        """Yield the existing complete lines; afterwards the file is truncated to the end of the last one."""
        end = 0
        with open(self.descriptor, "rb", closefd=False) as file:
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                end += len(line)
                yield line
            if len(line) == MAX_LINE_BYTES:
                raise UsageError(f"{self.path} has a line that was not written by a batch", "use another file")
        os.ftruncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)

    def write(self, lines: bytes) -> None:
        """Raises DiskFull. A resuming run removes a line that was partially written to a full disk."""
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
    """Whether the path exists and is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()

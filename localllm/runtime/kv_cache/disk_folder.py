"""The folder of the disk tier: snapshots in files of this user, of which the least recently used make way for new
ones.

Several processes may share a folder. Files are written under its lock, and renamed when they are complete and on
the disk, so that a killed process leaves nothing that is ever read. Readers need no lock: a file that another
process removes meanwhile stays readable where it is open, and counts as missing otherwise. No torch.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from localllm.errors import UsageError
from localllm.files import reason_of

log = logging.getLogger("localllm.cache")

FILE_NAME = re.compile(r"(?P<bucket>[0-9a-f]{32})-[0-9a-f]{32}\.safetensors")
DRAFT_PREFIX = ".draft-"
LOCK_NAME = ".lock"
WRITE_BYTES = 2**20  # at once
ALIGNMENT = 4096  # of direct writes, in bytes: no disk needs more
RESCAN_S = 0.2  # in which files of other processes may go unnoticed
RETRY_S = 60.0  # after a failed write, until the next is tried


def write_durably(path: Path, draft: Path, chunks: Iterable[Buffer]) -> None:
    """Write a file of this user alone durably, under the name of a draft that does not exist, and rename it."""
    try:
        descriptor = open_unbuffered(draft)
        try:
            write_aligned(descriptor, chunks)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_unbuffered(path: Path) -> int:
    """Create a file whose writes bypass the page cache, where the system can: in a virtual machine, the pages of 8
    MiB took 18 ms of processor time and a direct write 0.4 ms, and they would displace mapped weights."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with suppress(FileNotFoundError):  # some systems create the file before they refuse
        os.unlink(path)
    return os.open(path, flags, 0o600)


def write_aligned(descriptor: int, chunks: Iterable[Buffer]) -> None:
    """Write chunks from aligned memory, in multiples of ALIGNMENT, and cut the file to their length."""
    size = filled = 0
    with mmap.mmap(-1, WRITE_BYTES) as buffer, memoryview(buffer) as view:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            size += len(rest)
            while rest:
                part = rest[: WRITE_BYTES - filled]
                view[filled : filled + len(part)] = part
                filled, rest = filled + len(part), rest[len(part) :]
                if filled == WRITE_BYTES:
                    write_whole(descriptor, view)
                    filled = 0
        with view[: -(-filled // ALIGNMENT) * ALIGNMENT] as end:
            write_whole(descriptor, end)
    os.ftruncate(descriptor, size)


def write_whole(descriptor: int, content: memoryview) -> None:
    """Write to a file on a disk, where only a lack of space ends a write early."""
    try:
        written = os.write(descriptor, content)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # this system accepts direct writes only when it opens a file
        written = os.write(descriptor, content)
    if written < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class StoredFile:
    size: int
    used_ns: int  # last use, in nanoseconds since 1970


class CacheFolder:
    """The files of a folder by name. The part of a name before the hyphen is its bucket.

    Any thread may call its methods, but only one of them may write.
    """

    def __init__(self, path: Path, limit: int):
        """path: created if missing, private to this user; limit: bytes of all files. Raises UsageError if the
        folder cannot be used."""
        self.path = path
        self.limit = limit
        self.ignored: dict[str, int] = {}  # files that are not used, and when they were last written
        self.reported: set[str] = set()  # subjects of lines in the log
        self.retry_at = 0.0  # in seconds of `monotonic`; nothing is written before
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.scan()
        except OSError as error:
            raise UsageError(
                f"the prefix cache {path} cannot be used: {reason_of(error)}", "use another folder"
            ) from None

    def scan(self) -> None:
        """List the files."""
        self.scanned_at, self.changed_ns = time.monotonic(), os.stat(self.path).st_mtime_ns
        files, buckets, drafts = dict[str, StoredFile](), dict[str, list[str]](), list[str]()
        with os.scandir(self.path) as entries:
            for entry in entries:
                if match := FILE_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        files[entry.name] = StoredFile(status.st_size, status.st_mtime_ns)
                        if self.ignored.get(entry.name) != status.st_mtime_ns:
                            self.ignored.pop(entry.name, None)  # it has been written again
                            buckets.setdefault(match["bucket"], []).append(entry.name)
                elif entry.name.startswith(DRAFT_PREFIX):
                    drafts.append(entry.name)
        self.files, self.buckets, self.drafts = files, buckets, drafts

    def refresh(self) -> None:
        """List the files again if another process may have changed them."""
        if time.monotonic() > self.scanned_at + RESCAN_S:
            with suppress(OSError):
                self.scan_if_changed()

    def scan_if_changed(self) -> None:
        if os.stat(self.path).st_mtime_ns != self.changed_ns:
            self.scan()

    @property
    def used_bytes(self) -> int:
        return sum(file.size for file in list(self.files.values()))

    def names(self, bucket: str) -> list[str]:
        """Return the files of a bucket."""
        return list(self.buckets.get(bucket, ()))

    def touch(self, names: Iterable[str]) -> None:
        """Mark files as used now, the first as the last one used: the others are not found without it."""
        now = time.time_ns()
        for index, name in enumerate(names):
            used_ns = now - index * 1000
            if file := self.files.get(name):
                file.used_ns = used_ns
                with suppress(OSError):
                    os.utime(self.path / name, ns=(used_ns, used_ns))

    def ignore(self, name: str, why: object) -> None:
        """Do not use a file from now on, with one line in the log."""
        if (match := FILE_NAME.fullmatch(name)) and name in (bucket := self.buckets.get(match["bucket"], [])):
            bucket.remove(name)
            with suppress(OSError):
                self.ignored[name] = os.stat(self.path / name).st_mtime_ns
            self.report(name, f"the prefix cache ignores {self.path / name}: {why}")

    def report(self, subject: str, message: str) -> None:
        """Log a message, once per subject."""
        if subject not in self.reported:
            self.reported.add(subject)
            log.warning("%s", message)

    def write(self, name: str, chunks: Iterable[Buffer], size: int, replaces: Iterable[str] = ()) -> bool:
        """Write a file of `size` bytes, and remove the files that it replaces. Return whether it is there now; an
        error gets one line in the log."""
        if size > self.limit or time.monotonic() < self.retry_at:
            return False
        try:
            with self.lock():
                self.scan_if_changed()
                if name in self.files and name not in self.ignored:  # another process was faster
                    self.touch([name])
                    return True
                for replaced in replaces:
                    self.remove(replaced)
                self.make_room(size)
                write_durably(self.path / name, self.path / f"{DRAFT_PREFIX}{os.getpid()}", chunks)
                status = os.stat(self.path / name)
                self.files[name] = StoredFile(status.st_size, status.st_mtime_ns)
                self.ignored.pop(name, None)
                bucket = self.buckets.setdefault(name.partition("-")[0], [])
                if name not in bucket:
                    bucket.append(name)
                self.changed_ns = os.stat(self.path).st_mtime_ns
        except OSError as error:
            self.retry_at = time.monotonic() + RETRY_S
            self.report("write", f"the prefix cache {self.path} cannot be written: {reason_of(error)}")
            return False
        self.reported.discard("write")
        return True

    def make_room(self, size: int) -> None:
        """Remove drafts, then the least recently used files until `size` bytes more fit within the limit."""
        while self.drafts:  # of killed processes, as this one has the lock
            self.remove(self.drafts.pop())
        if self.used_bytes + size <= self.limit:
            return
        self.scan()  # other processes may have used files since
        used = self.used_bytes + size
        for name, file in sorted(self.files.items(), key=lambda item: item[1].used_ns):
            if used <= self.limit:
                break
            self.remove(name)
            used -= file.size

    def remove(self, name: str) -> None:
        """Delete a file."""
        with suppress(FileNotFoundError):
            os.unlink(self.path / name)
        self.files.pop(name, None)
        self.ignored.pop(name, None)
        if name in (bucket := self.buckets.get(name.partition("-")[0], [])):
            bucket.remove(name)

    def clear(self) -> int:
        """Delete all files, and return how many bytes they had."""
        with self.lock():
            self.scan()
            freed = self.used_bytes
            for name in list(self.files):
                self.remove(name)
        return freed

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock, as exactly one writer does."""
        descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

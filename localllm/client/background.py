"""The background server of this user: find it, start it, and stop it.

Its files are in the folder `background` of LOCALLLM_HOME. The server's process holds a lock on `server.lock` from
before it starts until it ends, even by a crash, so that at most one runs, and an address in `server.json` counts
only while the lock is held: no other program can listen there meanwhile.
"""

import fcntl
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from localllm.errors import Busy, LocalLLMError, NotWritable, ServerUnreachable, UsageError
from localllm.files import explain_disk_errors, reason_of, write_atomic

if TYPE_CHECKING:
    import subprocess  # takes 10 ms to import, and only starting a server needs it

LOCK_VARIABLE = "LOCALLLM_BACKGROUND_LOCK"  # descriptor of the lock, for the server's process
PATH_VARIABLES = ("LOCALLLM_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")  # made absolute
OTHER_START_TIMEOUT_S = 60.0  # for a server that another process starts, or that is shutting down
STOP_TIMEOUT_S = 60.0  # the server gives running answers 30 s
ACCEPT_TIMEOUT_S = 10.0
POLL_S = 0.02
HOME_REMEDY = "set LOCALLLM_HOME to a folder that can"


@dataclass(frozen=True)
class BackgroundServer:
    url: str
    pid: int
    log: Path


@dataclass(frozen=True)
class BackgroundFiles:
    """Paths of the files of the background server."""

    folder: Path

    @classmethod
    def of(cls, home: Path) -> "BackgroundFiles":
        return cls(home / "background")

    @property
    def lock(self) -> Path:
        return self.folder / "server.lock"

    @property
    def record(self) -> Path:
        return self.folder / "server.json"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def previous_log(self) -> Path:
        return self.folder / "server.log.1"


def find_server(home: Path) -> BackgroundServer | None:
    """The running background server of this user; None if there is none, or if it is not ready yet."""
    files = BackgroundFiles.of(home)
    return read_record(files) if is_locked(files) else None


def find_accepting_server(home: Path) -> BackgroundServer | None:
    """Like `find_server`, but test the connection: a killed process closes its sockets before it releases the
    lock. Raises Busy for a server that accepts none."""
    deadline = time.monotonic() + ACCEPT_TIMEOUT_S
    while server := find_server(home):
        address = urlsplit(server.url)
        try:
            socket.create_connection((address.hostname or "", address.port or 0), ACCEPT_TIMEOUT_S).close()
            return server
        except OSError as error:
            if time.monotonic() > deadline:
                message = f"process {server.pid} accepts no connection at {server.url} ({reason_of(error)})"
                raise Busy(message, "stop it with `localllm serve --stop`") from error
        time.sleep(POLL_S)
    return None


def is_locked(files: BackgroundFiles) -> bool:
    """Whether a process holds the lock. A lock file of another user counts as not held."""
    try:
        lock = os.open(files.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not is_private(lock):
            return False
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def is_private(descriptor: int) -> bool:
    """Whether only this user can write to the open file."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_record(files: BackgroundFiles) -> BackgroundServer | None:
    """The recorded server, if its process exists; None if there is no valid record of this user."""
    try:
        with open(os.open(files.record, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            content = file.read() if is_private(file.fileno()) else b""
        fields = json.loads(content)
        server = BackgroundServer(str(fields["url"]), int(fields["pid"]), files.log)
        os.kill(server.pid, 0)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    return server


def start_server(
    home: Path,
    arguments: Sequence[str],
    on_line: Callable[[str], object] = lambda line: None,
) -> tuple[BackgroundServer, bool]:
    """The background server, and whether this call has started it. Returns when it accepts connections.

    arguments: of `localllm serve`, with absolute paths; on_line: called with each line that the server logs until
    then. Raises NotWritable, DiskFull, Busy if a server that another process starts is not ready in time, and the
    error with which the server ends, with its exit code.
    """
    files = BackgroundFiles.of(home)
    lock = take_lock(files)
    if isinstance(lock, BackgroundServer):
        return lock, False
    try:
        with explain_disk_errors(files.folder, HOME_REMEDY):
            files.record.unlink(missing_ok=True)  # of a server that was killed
            process = spawn(files, lock, arguments)
    finally:
        os.close(lock)  # the server's process has inherited it
    try:
        return wait_until_ready(process, files, on_line), True
    except BaseException:
        with suppress(ProcessLookupError):
            process.terminate()
        raise


def take_lock(files: BackgroundFiles) -> int | BackgroundServer:
    """Descriptor of the lock, or the running server, which holds it. Raises the errors of `start_server`."""
    with explain_disk_errors(files.folder, HOME_REMEDY):
        files.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not is_private(lock):
            raise NotWritable(f"{files.lock} can be written by other users", HOME_REMEDY)
        deadline = time.monotonic() + OTHER_START_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if server := read_record(files):
                    os.close(lock)
                    return server
            if time.monotonic() > deadline:
                message = (
                    f"another process has been starting a background server for {OTHER_START_TIMEOUT_S:.0f} s"
                )
                raise Busy(message, f"wait, or see {files.log}")
            time.sleep(POLL_S)
    except BaseException:
        os.close(lock)
        raise


def spawn(files: BackgroundFiles, lock: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start the server's process in a session of its own, with its output in the log."""
    import subprocess

    with suppress(FileNotFoundError):
        os.replace(files.log, files.previous_log)
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [*program(), "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
            cwd=files.folder,
            env=os.environ | absolute_settings() | {LOCK_VARIABLE: str(lock)},
        )
    finally:
        os.close(log)


def program() -> list[str]:
    """Command line of this program; -P: nothing is imported from the current folder."""
    return [sys.executable, "-P", "-m", "localllm"]


def absolute_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that name folders, for a process with another current folder."""
    return {
        name: os.path.abspath(os.path.expanduser(environment[name]))
        for name in PATH_VARIABLES
        if environment.get(name)
    }


def wait_until_ready(
    process: "subprocess.Popen[bytes]", files: BackgroundFiles, on_line: Callable[[str], object]
) -> BackgroundServer:
    """Wait until the server has recorded its address. Raises the error with which it ends."""
    lines = list[str]()
    with open(files.log, encoding="utf-8", errors="replace") as log:
        rest = ""
        while True:
            code = process.poll()
            *complete, rest = (rest + log.read()).split("\n")
            lines += complete
            for line in complete:
                if not line.startswith("error: "):
                    on_line(line)
            if (server := read_record(files)) and server.pid == process.pid:
                return server
            if code is not None:
                raise start_error(lines, code, files.log)
            time.sleep(POLL_S)


def start_error(lines: Sequence[str], code: int, log: Path) -> LocalLLMError:
    """The error that the server printed last, with its exit code."""
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if messages:
        error = LocalLLMError(messages[-1])
    else:
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        error = LocalLLMError(f"the background server ended {cause} before it was ready", f"see {log}")
    error.exit_code = code if code > 0 else LocalLLMError.exit_code
    return error


def stop_server(home: Path) -> BackgroundServer:
    """End the background server gracefully, and return it when its process has ended. Raises ServerUnreachable if
    none is running, and Busy if it does not end in time."""
    files = BackgroundFiles.of(home)
    server = find_server(home)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while server is None and is_locked(files) and time.monotonic() < deadline:  # it starts or ends
        time.sleep(POLL_S)
        server = find_server(home)
    if server is None:
        raise ServerUnreachable("no background server is running", "`localllm serve --background` starts one")
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
    while is_locked(files):
        if time.monotonic() > deadline:
            raise Busy(f"process {server.pid} has not ended in {STOP_TIMEOUT_S:.0f} s", f"see {server.log}")
        time.sleep(POLL_S)
    return server


class BackgroundRecord:
    """The record of this process, which is a background server."""

    def __init__(self, files: BackgroundFiles):
        self.files = files

    def publish(self, url: str) -> None:
        """Record the address, once the server accepts connections."""
        write_atomic(self.files.record, json.dumps({"url": url, "pid": os.getpid()}) + "\n")

    def withdraw(self) -> None:
        """Remove the record, before the server stops to accept connections."""
        with suppress(OSError):
            self.files.record.unlink(missing_ok=True)


def inherited_record(home: Path) -> BackgroundRecord | None:
    """The record to publish if `start_server` has started this process, otherwise None. Raises UsageError for a
    descriptor that is not the lock's."""
    text = os.environ.pop(LOCK_VARIABLE, None)  # not for child processes
    if text is None:
        return None
    files = BackgroundFiles.of(home)
    lock = -1
    try:
        lock = int(text)
        is_lock = os.path.samestat(os.fstat(lock), os.stat(files.lock, follow_symlinks=False))
    except (OSError, ValueError, OverflowError):
        is_lock = False
    if not is_lock:
        raise UsageError(f"{LOCK_VARIABLE} is {text!r}, which is not an open lock file", "leave it unset")
    os.set_inheritable(lock, False)
    return BackgroundRecord(files)

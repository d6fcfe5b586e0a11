"""Starts the processes that compute prompts, and again those that end.

The processes that answer, one or several, connect to them by sockets. This process binds the sockets and hands
them on, so that a connection waits while a process is started again, and is refused once one has been given up.
"""

import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from localllm.errors import UsageError
from localllm.parallel.channel import FAILED, LOADED, SETUP, describe_end, end_process, start_process

MODULE = "localllm.llm.prefill_process"
FOLDER_PREFIX = "localllm-prefill-"
MAX_FAILURES = 5  # in a row, after which a process is not started again
FIRST_DELAY_S = 1.0  # before it is started again; doubled after each further failure
STEADY_S = 60.0  # after which a process that has loaded the model counts as running
MAX_PATH_BYTES = 103  # of a socket on macOS; on Linux 107
BACKLOG = 128  # connections that wait for a process

log = logging.getLogger("localllm.prefill")


class PrefillSupervisor:
    """Processes that compute prompts. They end with this process."""

    def __init__(self, devices: Sequence[str]):
        """devices: of each process. Raises UsageError if the folder of temporary files has too long a path."""
        remove_old_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))  # readable by its owner
        if len(os.fsencode(self.folder / "00")) > MAX_PATH_BYTES:
            self.folder.rmdir()
            raise UsageError(
                f"{self.folder.parent} has too long a path for sockets", "set TMPDIR to a shorter one"
            )
        self.closed = threading.Event()
        self.processes = [
            SupervisedProcess(number, device, self.folder / str(number), self.closed)
            for number, device in enumerate(devices, 1)
        ]

    @property
    def sockets(self) -> list[Path]:
        """Addresses of the processes."""
        return [process.path for process in self.processes]

    def close(self) -> None:
        """End the processes."""
        self.closed.set()
        for process in self.processes:
            process.channel.close()
        for process in self.processes:
            process.thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class SupervisedProcess:
    """A process that computes prompts, and those that replace it."""

    def __init__(self, number: int, device: str, path: Path, closed: threading.Event):
        """path: of its socket; closed: set to end it"""
        self.number, self.device, self.path, self.closed = number, device, path, closed
        self.was_loaded = False  # until then, errors are reported to its first connection
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(BACKLOG)
        self.start()
        self.thread = threading.Thread(target=self.watch, name="localllm-prefill", daemon=True)
        self.thread.start()

    def start(self) -> None:
        self.process, self.channel = start_process(MODULE, [self.listener.fileno()])
        with suppress(OSError):  # it has ended, which `watch` sees
            self.channel.send(SETUP, json.dumps({"device": self.device}).encode())
        if self.closed.is_set():
            self.channel.close()

    def watch(self) -> None:
        """Start the process again whenever it ends: the body of a thread."""
        failures = 0
        while True:
            is_steady, was_told, reason = self.wait_for_end()
            self.channel.close()
            if self.closed.is_set():
                break
            failures = 1 if is_steady else failures + 1
            if failures == MAX_FAILURES:
                text = "prefill process %d %s, %d times in a row; it is not started again"
                log.error(text, self.number, reason, failures)
                break
            delay_s = FIRST_DELAY_S * 2 ** (failures - 1)
            if self.was_loaded or not was_told:
                text = "prefill process %d %s; others compute its prompts, and it starts again in %g s"
                log.warning(text, self.number, reason, delay_s)
            if self.closed.wait(delay_s):
                break
            end_process(self.process)  # if it hangs
            with suppress(OSError):  # without memory for a process; this counts as the next failure
                self.start()
        self.listener.close()  # refuses further connections
        end_process(self.process)

    def wait_for_end(self) -> tuple[bool, bool, str]:
        """Wait until the process ends. Returns whether it had been running, whether it has told its error, and how
        it has ended."""
        loaded_at, reason = None, None
        while message := self.channel.receive():
            if message[0] == LOADED:
                if self.was_loaded:
                    log.info("prefill process %d computes prompts again", self.number)
                loaded_at, self.was_loaded = time.monotonic(), True
            elif message[0] == FAILED:
                reason = f"failed: {json.loads(message[1])['message']}"
        is_steady = loaded_at is not None and time.monotonic() - loaded_at >= STEADY_S
        return is_steady, bool(reason), reason or ("" if self.closed.is_set() else describe_end(self.process))


def remove_old_folders() -> None:
    """Remove folders of processes that were killed and left them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        with suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)

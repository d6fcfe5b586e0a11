"""Starts, queries and ends the process in which templates are rendered."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from localllm.errors import DamagedModel, LocalLLMError

TEMPLATE_PROCESS = Path(__file__).with_name("template_process.py")
START_LIMIT_S = 30.0  # for a cold disk under load; about 0.1 s otherwise
RENDER_LIMIT_S = 2.0  # wall-clock time; the process's own limit of CPU time ends it earlier


class TemplateSandbox:
    """A process with limited memory and time, started on demand and replaced when it dies.

    Safe to use from several threads, with one rendering at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            self._start()

    def request(self, request: bytes) -> dict[str, str]:
        """Send one line of JSON and return the response.

        Raises DamagedModel if the process died of the request, LocalLLMError if it cannot be started.
        """
        with self._lock:
            process = self._start()
            try:
                if not self._ready and self._exchange(process, b"", START_LIMIT_S) != b"ready\n":
                    raise LocalLLMError("the process for chat templates did not start", "is jinja2 installed?")
                self._ready = True
                line = self._exchange(process, request + b"\n", RENDER_LIMIT_S)
                if not line.endswith(b"\n"):
                    raise DamagedModel(_cause(process), "the template is broken, or the conversation is too long")
                return json.loads(line)
            except BaseException:
                self._end()  # otherwise the next exchange would receive this response
                raise

    def close(self) -> None:
        """End the process, if there is one. The next request starts another."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # -P: import nothing from the folder of the program or the user; its own process group receives no
            # Ctrl-C
            command = [sys.executable, "-P", str(TEMPLATE_PROCESS)]
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0
                )
            except OSError as error:
                raise LocalLLMError(f"the process for chat templates cannot be started: {error}") from error
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._ready = None, False

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, limit_s: float) -> bytes:
        """Write a request, then read a line; it is incomplete if the process died or took too long."""
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        deadline = time.monotonic() + limit_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
                read = os.read(process.stdout.fileno(), 2**20)
                if not read:
                    break
                line += read
        return bytes(line)


def _cause(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        code = -signal.SIGPROF  # still running
    if code == -signal.SIGPROF:
        return "the chat template ran for too long and was stopped"
    return "the chat template used too much memory"

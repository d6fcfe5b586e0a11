"""Processes that this one starts, and the messages to and from them, over a socket that also shows when one of the
two ends: a pair of sockets within a machine, TCP between machines.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from typing_extensions import Buffer

from localllm.errors import (
    Busy,
    DamagedModel,
    DoesNotFit,
    LocalLLMError,
    ModelNotFound,
    NoSuchDevice,
    UnsupportedModel,
    UsageError,
)

# Kinds of messages between processes that compute one model. A process that ends sends none: its socket is closed.
SETUP, STEP, CACHES, LOADED, CONNECTED, FAILED, COPY_OUT, COPIED, COPY_IN = range(9)
# Between machines. FORWARDED: an ADDRESS and a message, which a worker's first process forwards to or from others
# there; PREFILL: instead of SETUP, to compute prompts (`disaggregation/transport.py` has what follows).
HIDDEN, VERSIONS, FACTS, MODEL, FORWARDED, PREFILL = range(9, 15)
FRAME = struct.Struct("<iq")  # kind and bytes of a message
ADDRESS = struct.Struct("<ii")  # rank of the process in its stage, and the kind for it; keeps tensors aligned
HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last on Linux, of one direction
MAX_MESSAGE_BYTES = 2**30  # hidden states of a chunk of a prompt take up to 0.1 GB
JOINED_BYTES = 2**16  # up to which a message is sent at once: of a process killed meanwhile, all or none arrives
EXIT_WAIT_S = 5.0  # for a process that was told to end
REPORTED = {
    each.__name__: each
    for each in (Busy, DamagedModel, DoesNotFit, ModelNotFound, NoSuchDevice, UnsupportedModel, UsageError)
}


class Channel:
    """Messages to and from another process, over a socket."""

    def __init__(self, connection: socket.socket, limit: int = MAX_MESSAGE_BYTES):
        """limit: bytes of a message that is received; a larger one ends the connection"""
        self.connection = connection
        self.limit = limit
        self.began_at = self.heard_at = time.monotonic()  # of the last message that began, and the last bytes
        self.lock = threading.Lock()  # so that messages of several threads do not mix

    def send(self, kind: int, content: bytes | bytearray | memoryview) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        frame = FRAME.pack(kind, len(content))
        with self.lock:
            if len(content) <= JOINED_BYTES:
                self.connection.sendall(frame + content)
            else:
                self.connection.sendall(frame)
                self.connection.sendall(content)

    def send_parts(self, kind: int, parts: Iterable[Buffer]) -> None:
        """Send a message in parts, without copying them where it is large. Raises the errors of `send`."""
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        if size <= JOINED_BYTES:
            return self.send(kind, b"".join(views))
        with self.lock:
            self.connection.sendall(FRAME.pack(kind, size))
            for view in views:
                self.connection.sendall(view)

    def send_failure(self, error: Exception, kind: int = FAILED) -> None:
        """Report an error, as a message of this kind, unless the other process has ended."""
        if isinstance(error, LocalLLMError):
            fields = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
        else:
            fields = {"error": None, "message": f"{type(error).__name__}: {error}", "remedy": None}
        with contextlib.suppress(OSError):
            self.send(kind, json.dumps(fields).encode())

    def receive(self) -> tuple[int, bytearray] | None:
        """Return the next message; None if the other process has ended, or its message is too large."""
        frame = self.read(FRAME.size)
        if frame is None:
            return None
        self.began_at = self.heard_at
        kind, count = FRAME.unpack(frame)
        content = self.read(count) if 0 <= count <= self.limit else None
        return None if content is None else (kind, content)

    def read(self, count: int) -> bytearray | None:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            try:
                received = self.connection.recv_into(view)
            except OSError:
                return None
            if not received:
                return None
            self.heard_at = time.monotonic()
            view = view[received:]
        return content

    @property
    def is_closed(self) -> bool:
        """Whether the other process has ended, and sent nothing that was not received."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def reported_error(title: str, content: bytearray) -> LocalLLMError:
    """Return the error of a FAILED message. title: of the process that has sent it"""
    fields = json.loads(content)
    return REPORTED.get(fields["error"], LocalLLMError)(f"{title}: {fields['message']}", fields["remedy"])


def open_memory(size: int) -> int:
    """Return the descriptor of a file without a name that processes can map. It takes memory as it is written, and
    none once all of them have ended."""
    if hasattr(os, "memfd_create"):  # on Linux; /dev/shm may be small in a container
        descriptor = os.memfd_create("localllm")
    else:
        descriptor, name = tempfile.mkstemp("localllm")
        Path(name).unlink()
    os.ftruncate(descriptor, size)
    return descriptor


def start_process(module: str, descriptors: Iterable[int] = ()) -> tuple["subprocess.Popen[bytes]", Channel]:
    """Start `python -m MODULE SOCKET DESCRIPTOR...`, and return it with the channel to it. descriptors: of open
    files that it inherits"""
    own, other = socket.socketpair()
    with other:
        numbers = [other.fileno(), *descriptors]
        # In a process group of its own: the Ctrl-C of a terminal ends this process, and the other ends with it.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    return process, Channel(own)


def wait_for_hangup(*connections: socket.socket) -> None:
    """Wait until the other side of a connection has closed it, whatever it has sent before."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, HUNG_UP)
    poll.poll()


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Return how a process whose channel is closed has ended, such as "has ended (exit code 1)"."""
    try:
        code = process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return "does not answer any more"
    reason = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"has ended ({reason})"


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process whose channel was closed, and kill it if it does not end."""
    try:
        process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

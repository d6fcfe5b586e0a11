"""From files to a device, so that disk, bus and model work at once: threads read pieces of tensors into a ring of
pinned buffers, which a stream of its own copies to the device, while the model takes the tensors before them.

Tensors are read ahead in the order that a decoder takes them in, so much that memory stays bounded; one that is
asked for out of turn is read when it is. Knows nothing of what tensors mean: those that it gives are as stored.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.stored import tensor_of
from localllm.files import damaged
from localllm.metrics import Phases
from localllm.runtime.ways import Sent, Way

READERS = 4
BUFFERS = 8
BUFFER_BYTES = 2**24
AHEAD_BYTES = 2**29  # of the device, in tensors that nobody has taken yet
LAYER = re.compile(r"layers\.(\d+)\.")
BEHIND = ("norm.", "lm_head.")  # the layers


class Arriving:
    """A tensor of which some pieces are still to come."""

    def __init__(self, raw: Tensor, pieces: int):
        self.raw = raw
        self.left = pieces
        self.lock = threading.Lock()
        self.sent: list[Sent] = []
        self.done: Future[None] = Future()  # every copy has begun
        if not pieces:
            self.done.set_result(None)

    def came(self, sent: Sent | None) -> None:
        with self.lock:
            self.left -= 1
            self.sent += [sent] if sent else []
            if not self.left and not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if not self.done.done():
                self.done.set_exception(error)


class Transfer:
    """Used by one thread, in a `with`, at whose end no thread and no buffer is left.

    tensors: those that will be taken, by their names in `arch.layout`; phases: to note under `read` how long the
    disk and the bus were waited for.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorHeader],
        way: Way,
        buffer_bytes: int = BUFFER_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        phases: Phases | None = None,
    ):
        self.way = way
        self.buffer_bytes = buffer_bytes
        self.ahead_bytes = ahead_bytes
        self.coming = iter(sorted(tensors.items(), key=turn))
        self.next = next(self.coming, None)
        self.arriving: dict[TensorHeader, Arriving] = {}
        self.taken: set[TensorHeader] = set()
        self.ahead = 0  # bytes in `arriving`
        self.files: dict[Path, tuple[int, os.stat_result]] = {}
        self.free: SimpleQueue[tuple[Tensor, Sent | None]] = SimpleQueue()
        for _ in range(BUFFERS):
            self.free.put((way.buffer(buffer_bytes), None))
        self.readers = ThreadPoolExecutor(READERS, "localllm-reader")
        self.closed = False
        self.phases = phases or Phases()
        self.nbytes = 0
        self.begin_s = self.end_s = time.perf_counter()

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True
        self.readers.shutdown(cancel_futures=True)
        for _ in range(BUFFERS):
            _, sent = self.free.get()
            if sent:
                sent.synchronize()
        self.end_s = time.perf_counter()
        for handle, _ in self.files.values():
            os.close(handle)
        self.arriving.clear()

    @property
    def bytes_per_s(self) -> float:
        """Of what was taken, from the first that was asked for until the model was made of all."""
        return self.nbytes / (self.end_s - self.begin_s)

    def read(self, entry: TensorHeader) -> Tensor:
        """As `tensor_of`, on the device. Raises DamagedModel where the file ends too early, OSError."""
        if entry not in self.arriving:
            self.ask(entry)
        self.look_ahead()
        arriving = self.arriving.pop(entry)
        with self.phases("read"):
            arriving.done.result()
        self.way.arrived(arriving.sent)
        self.taken.add(entry)
        self.ahead -= entry.nbytes
        self.nbytes += entry.nbytes
        return tensor_of(arriving.raw, entry)

    def look_ahead(self) -> None:
        while self.next and (entry := self.next[1]):
            if entry not in self.arriving and entry not in self.taken:
                if self.ahead + entry.nbytes > self.ahead_bytes:
                    return
                self.ask(entry)
            self.next = next(self.coming, None)

    def ask(self, entry: TensorHeader) -> None:
        pieces = list(cut(entry, self.buffer_bytes))
        arriving = self.arriving[entry] = Arriving(self.way.room(entry.nbytes), len(pieces))
        self.ahead += entry.nbytes
        handle = self.opened(entry.file)
        for piece in pieces:
            self.readers.submit(self.carry, entry, handle, piece, arriving)

    def carry(self, entry: TensorHeader, handle: int, piece: range, arriving: Arriving) -> None:
        """One piece from the file to the device; by one of the readers."""
        if self.closed:
            return
        buffer, sent = self.free.get()
        try:
            if sent:
                sent.synchronize()  # what was in it has left
            source = buffer[: len(piece)]
            fill(source, entry, handle, piece.start)
            begin = piece.start - entry.begin
            with torch.inference_mode():  # as the tensor may have been made
                sent = self.way.send(arriving.raw[begin : begin + len(piece)], source)
            arriving.came(sent)
        except BaseException as error:
            arriving.fail(error)
        finally:
            self.free.put((buffer, sent))

    def opened(self, file: Path) -> int:
        if file not in self.files:
            handle = os.open(file, os.O_RDONLY)
            self.files[file] = handle, os.fstat(handle)
        return self.files[file][0]

    def check_unchanged(self) -> None:
        """Raises DamagedModel where somebody has written to a file since it was first read."""
        for file, (handle, before) in self.files.items():
            now = os.fstat(handle)
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise damaged(file, "it was changed while it was read")


def turn(named: tuple[str, TensorHeader]) -> tuple[int, Path, int]:
    """When a decoder takes a tensor: before the layers, in one, or behind; there, as they lie in the files."""
    name, entry = named
    layer = LAYER.match(name)
    when = int(layer[1]) if layer else 2**31 if name.startswith(BEHIND) else -1
    return when, entry.file, entry.begin


def cut(entry: TensorHeader, size: int) -> Iterator[range]:
    """The bytes of its file that a tensor lies in, so many at a time."""
    end = entry.begin + entry.nbytes
    for begin in range(entry.begin, end, size):
        yield range(begin, min(begin + size, end))


def fill(buffer: Tensor, entry: TensorHeader, handle: int, offset: int) -> None:
    """With the bytes of the file from `offset` on."""
    room = buffer.numpy().data
    while room:
        count = os.preadv(handle, [room], offset)
        if not count:
            raise damaged(entry.file, f"it ends after {offset} bytes, and {entry.name!r} goes on")
        room, offset = room[count:], offset + count

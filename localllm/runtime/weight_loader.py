"""From files to a device, so that disk, bus and model work at once: threads read pieces of tensors into a ring of
pinned buffers, which a stream of its own copies to the device, while the model takes the tensors before them.

Tensors are read ahead in the order that a decoder takes them in, so much that memory stays bounded; one that is
asked for out of turn is read when it is. Knows nothing of what tensors mean: those that it gives are as stored.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.stored import decode_tensor
from localllm.files import damaged_file
from localllm.metrics import PhaseTimer


# How bytes that were read get to a device: from pinned buffers by a GPU's stream, or copied at once on a CPU.
class PendingCopy(Protocol):
    """A copy on its way to the device; torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class DeviceCopier(Protocol):
    """How bytes get to the device."""

    def host_buffer(self, size: int) -> Tensor:
        """uint8 [size] on the host, to read into."""
        ...

    def device_buffer(self, size: int) -> Tensor:
        """uint8 [size] on the device. Called by the thread that takes tensors, as `arrived` is."""
        ...

    def start_copy(self, target: Tensor, source: Tensor) -> PendingCopy | None:
        """Begin to copy; None: it is done."""
        ...

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        """What this thread does next on the device comes after these copies."""
        ...


class CudaCopier:
    """To a GPU, by a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size: int) -> Tensor:
        room = torch.empty(size, dtype=torch.uint8, device=self.device)
        # What the allocator gives may have been another tensor's, of which work is still to be done.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return room

    def start_copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            sent = torch.cuda.Event(blocking=True)
            sent.record(self.stream)
        return sent

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        for event in copies:
            assert isinstance(event, torch.cuda.Event)
            torch.cuda.current_stream(self.device).wait_event(event)


class CpuCopier:
    """To the CPU, by the thread that has read."""

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    device_buffer = host_buffer

    def start_copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        pass


READER_THREADS = 4
BUFFER_COUNT = 8
BUFFER_BYTES = 2**24
READ_AHEAD_BYTES = 2**29  # of the device, in tensors that nobody has taken yet
LAYER_NAME = re.compile(r"layers\.(\d+)\.")
AFTER_LAYERS = ("norm.", "lm_head.")  # the layers


class PendingTensor:
    """A tensor of which some pieces are still to come."""

    def __init__(self, raw: Tensor, pieces: int):
        self.raw = raw
        self.pieces_left = pieces
        self.lock = threading.Lock()
        self.copies: list[PendingCopy] = []
        self.done: Future[None] = Future()  # every copy has begun
        if not pieces:
            self.done.set_result(None)

    def finish_piece(self, copy: PendingCopy | None) -> None:
        with self.lock:
            self.pieces_left -= 1
            self.copies += [copy] if copy else []
            if not self.pieces_left and not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if not self.done.done():
                self.done.set_exception(error)


class WeightLoader:
    """Used by one thread, in a `with`, at whose end no thread and no buffer is left.

    tensors: those that will be taken, by their names in `arch.layout`; phases: to note under `read` how long the
    disk and the bus were waited for.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorHeader],
        copier: DeviceCopier,
        buffer_bytes: int = BUFFER_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        phases: PhaseTimer | None = None,
    ):
        self.copier = copier
        self.buffer_bytes = buffer_bytes
        self.read_ahead_bytes = read_ahead_bytes
        self.upcoming = iter(sorted(tensors.items(), key=load_order))
        self.next = next(self.upcoming, None)
        self.pending: dict[TensorHeader, PendingTensor] = {}
        self.taken: set[TensorHeader] = set()
        self.pending_bytes = 0  # bytes in `arriving`
        self.files: dict[Path, tuple[int, os.stat_result]] = {}
        self.free_buffers: SimpleQueue[tuple[Tensor, PendingCopy | None]] = SimpleQueue()
        for _ in range(BUFFER_COUNT):
            self.free_buffers.put((copier.host_buffer(buffer_bytes), None))
        self.readers = ThreadPoolExecutor(READER_THREADS, "localllm-reader")
        self.closed = False
        self.phases = phases or PhaseTimer()
        self.nbytes = 0
        self.begin_s = self.end_s = time.perf_counter()

    def __enter__(self) -> "WeightLoader":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True
        self.readers.shutdown(cancel_futures=True)
        for _ in range(BUFFER_COUNT):
            _, sent = self.free_buffers.get()
            if sent:
                sent.synchronize()
        self.end_s = time.perf_counter()
        for handle, _ in self.files.values():
            os.close(handle)
        self.pending.clear()

    @property
    def bytes_per_s(self) -> float:
        """Of what was taken, from the first that was asked for until the model was made of all."""
        return self.nbytes / (self.end_s - self.begin_s)

    def read(self, entry: TensorHeader) -> Tensor:
        """As `tensor_of`, on the device. Raises DamagedModel where the file ends too early, OSError."""
        if entry not in self.pending:
            self.start_reading(entry)
        self.read_ahead()
        arriving = self.pending.pop(entry)
        with self.phases("read"):
            arriving.done.result()
        self.copier.wait_for_copies(arriving.copies)
        self.taken.add(entry)
        self.pending_bytes -= entry.nbytes
        self.nbytes += entry.nbytes
        return decode_tensor(arriving.raw, entry)

    def read_ahead(self) -> None:
        while self.next and (entry := self.next[1]):
            if entry not in self.pending and entry not in self.taken:
                if self.pending_bytes + entry.nbytes > self.read_ahead_bytes:
                    return
                self.start_reading(entry)
            self.next = next(self.upcoming, None)

    def start_reading(self, entry: TensorHeader) -> None:
        pieces = list(split_pieces(entry, self.buffer_bytes))
        arriving = self.pending[entry] = PendingTensor(self.copier.device_buffer(entry.nbytes), len(pieces))
        self.pending_bytes += entry.nbytes
        handle = self.open_file(entry.file)
        for piece in pieces:
            self.readers.submit(self.copy_piece, entry, handle, piece, arriving)

    def copy_piece(self, entry: TensorHeader, handle: int, piece: range, pending: PendingTensor) -> None:
        """Copy one piece of a tensor from the file to the device, on a reader thread."""
        if self.closed:
            return
        buffer, sent = self.free_buffers.get()
        try:
            if sent:
                sent.synchronize()  # what was in it has left
            source = buffer[: len(piece)]
            read_into(source, entry, handle, piece.start)
            begin = piece.start - entry.begin
            with torch.inference_mode():  # as the tensor may have been made
                sent = self.copier.start_copy(pending.raw[begin : begin + len(piece)], source)
            pending.finish_piece(sent)
        except BaseException as error:
            pending.fail(error)
        finally:
            self.free_buffers.put((buffer, sent))

    def open_file(self, file: Path) -> int:
        if file not in self.files:
            handle = os.open(file, os.O_RDONLY)
            self.files[file] = handle, os.fstat(handle)
        return self.files[file][0]

    def check_unchanged(self) -> None:
        """Raises DamagedModel where somebody has written to a file since it was first read."""
        for file, (handle, before) in self.files.items():
            now = os.fstat(handle)
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise damaged_file(file, "it was changed while it was read")


def load_order(item: tuple[str, TensorHeader]) -> tuple[int, Path, int]:
    """When a decoder takes a tensor: before the layers, in one, or behind; there, as they lie in the files."""
    name, entry = item
    layer = LAYER_NAME.match(name)
    when = int(layer[1]) if layer else 2**31 if name.startswith(AFTER_LAYERS) else -1
    return when, entry.file, entry.begin


def split_pieces(entry: TensorHeader, size: int) -> Iterator[range]:
    """The bytes of its file that a tensor lies in, so many at a time."""
    end = entry.begin + entry.nbytes
    for begin in range(entry.begin, end, size):
        yield range(begin, min(begin + size, end))


def read_into(buffer: Tensor, entry: TensorHeader, handle: int, offset: int) -> None:
    """With the bytes of the file from `offset` on."""
    room = buffer.numpy().data
    while room:
        count = os.preadv(handle, [room], offset)
        if not count:
            raise damaged_file(entry.file, f"it ends after {offset} bytes, and {entry.name!r} goes on")
        room, offset = room[count:], offset + count

"""Loads weights from files to a device with disk, bus and model working in parallel.

Threads read pieces of tensors into a ring of pinned buffers, and a separate stream copies these to the device,
while the model takes the tensors before them. Tensors are read ahead in the order in which a decoder takes them,
up to a limit that bounds memory; one that is taken out of order is read on demand. Tensors are returned as stored,
without interpretation.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from localllm.checkpoint.header import TensorHeader
from localllm.checkpoint.tensors import decode_tensor
from localllm.files import damaged_file
from localllm.metrics import PhaseTimer

READER_THREADS = 4
BUFFER_COUNT = 8
BUFFER_BYTES = 2**24
READ_AHEAD_BYTES = 2**29  # on the device, of tensors that have not been taken yet
LAYER_NAME = re.compile(r"layers\.(\d+)\.")
AFTER_LAYERS = ("norm.", "lm_head.")  # prefixes of the tensors that come after the layers


class PendingCopy(Protocol):
    """A copy to the device in progress; torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Wait for the copy."""
        ...


class DeviceCopier(Protocol):
    """Copies bytes from host buffers to the device."""

    def host_buffer(self, size: int) -> Tensor:
        """Return a host buffer to read into, [size] uint8."""
        ...

    def device_buffer(self, size: int) -> Tensor:
        """Return a device buffer, [size] uint8.

        Called by the thread that takes tensors, like `wait_for_copies`.
        """
        ...

    def start_copy(self, target: Tensor, source: Tensor) -> PendingCopy | None:
        """Start a copy; None means that it is already complete."""
        ...

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        """Make this thread's next device work wait for these copies."""
        ...


class CudaCopier:
    """Copies to a GPU on a separate stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        # The allocator may reuse memory of another tensor that pending work still reads.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return buffer

    def start_copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
        return event

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        for event in copies:
            assert isinstance(event, torch.cuda.Event)
            torch.cuda.current_stream(self.device).wait_event(event)


class CpuCopier:
    """Copies to the CPU, on the reader threads."""

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    device_buffer = host_buffer

    def start_copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait_for_copies(self, copies: Iterable[PendingCopy]) -> None:
        pass


class PendingTensor:
    """A tensor with pieces that are still being read or copied."""

    def __init__(self, raw: Tensor, pieces: int):
        self.raw = raw
        self.pieces_left = pieces
        self.lock = threading.Lock()
        self.copies: list[PendingCopy] = []
        self.done: Future[None] = Future()  # set once every copy has started
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


class Piece(NamedTuple):
    """Adjacent bytes of a tensor, from one or several ranges of its file."""

    begin: int  # in the tensor
    nbytes: int
    ranges: tuple[tuple[int, int], ...]  # offset in the file and bytes


class WeightLoader:
    """Reads tensors ahead. Use it in one thread and a `with` block, which ends all threads and frees all buffers.

    tensors: those that will be taken, by their names in `arch.layout`; phases: records the time spent waiting for
    disk and bus as `read`.
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
        self.pending_bytes = 0  # bytes of the tensors in `pending`
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
            _, copy = self.free_buffers.get()
            if copy:
                copy.synchronize()
        self.end_s = time.perf_counter()
        for handle, _ in self.files.values():
            os.close(handle)
        self.pending.clear()

    @property
    def bytes_per_s(self) -> float:
        """Rate of the tensors that were taken, from construction until the `with` block ended."""
        return self.nbytes / (self.end_s - self.begin_s)

    def read(self, entry: TensorHeader) -> Tensor:
        """Return a tensor on the device, as stored. Raises DamagedModel if the file is too short, or OSError."""
        if entry not in self.pending:
            self.start_reading(entry)
        self.read_ahead()
        pending = self.pending.pop(entry)
        with self.phases("read"):
            pending.done.result()
        self.copier.wait_for_copies(pending.copies)
        self.taken.add(entry)
        self.pending_bytes -= entry.nbytes
        self.nbytes += entry.nbytes
        return decode_tensor(pending.raw, entry)

    def read_ahead(self) -> None:
        while self.next and (entry := self.next[1]):
            if entry not in self.pending and entry not in self.taken:
                if self.pending_bytes + entry.nbytes > self.read_ahead_bytes:
                    return
                self.start_reading(entry)
            self.next = next(self.upcoming, None)

    def start_reading(self, entry: TensorHeader) -> None:
        pieces = list(split_pieces(entry, self.buffer_bytes))
        pending = self.pending[entry] = PendingTensor(self.copier.device_buffer(entry.nbytes), len(pieces))
        self.pending_bytes += entry.nbytes
        handle = self.open_file(entry.file)
        for piece in pieces:
            self.readers.submit(self.copy_piece, entry, handle, piece, pending)

    def copy_piece(self, entry: TensorHeader, handle: int, piece: Piece, pending: PendingTensor) -> None:
        """Copy one piece of a tensor from the file to the device, on a reader thread."""
        if self.closed:
            return
        buffer, copy = self.free_buffers.get()
        try:
            if copy:
                copy.synchronize()  # the buffer is free once its last copy is done
            source = buffer[: piece.nbytes]
            begin = 0
            for offset, count in piece.ranges:
                read_into(source[begin : begin + count], entry, handle, offset)
                begin += count
            with torch.inference_mode():  # the mode in which the tensor may have been allocated
                copy = self.copier.start_copy(pending.raw[piece.begin : piece.begin + piece.nbytes], source)
            pending.finish_piece(copy)
        except BaseException as error:
            pending.fail(error)
        finally:
            self.free_buffers.put((buffer, copy))

    def open_file(self, file: Path) -> int:
        if file not in self.files:
            handle = os.open(file, os.O_RDONLY)
            self.files[file] = handle, os.fstat(handle)
        return self.files[file][0]

    def check_unchanged(self) -> None:
        """Raise DamagedModel if a file has been modified since it was opened."""
        for file, (handle, opened) in self.files.items():
            current = os.fstat(handle)
            if (current.st_size, current.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
                raise damaged_file(file, "it was modified while it was being read")


def load_order(item: tuple[str, TensorHeader]) -> tuple[int, Path, int]:
    """Sort key for the order in which a decoder takes tensors: before, in and after the layers, then by offset."""
    name, entry = item
    layer = LAYER_NAME.match(name)
    order = int(layer[1]) if layer else 2**31 if name.startswith(AFTER_LAYERS) else -1
    return order, entry.file, entry.begin


def split_pieces(entry: TensorHeader, size: int) -> Iterator[Piece]:
    """Yield the pieces of a tensor, at most `size` bytes each."""
    begin, nbytes, ranges = 0, 0, list[tuple[int, int]]()
    for offset, count in entry.file_ranges:
        while count:
            taken = min(count, size - nbytes)
            ranges.append((offset, taken))
            offset, count, nbytes = offset + taken, count - taken, nbytes + taken
            if nbytes == size:
                yield Piece(begin, nbytes, tuple(ranges))
                begin, nbytes, ranges = begin + nbytes, 0, []
    if nbytes:
        yield Piece(begin, nbytes, tuple(ranges))


def read_into(buffer: Tensor, entry: TensorHeader, handle: int, offset: int) -> None:
    """Fill a buffer with the file's bytes from `offset` on."""
    remaining = buffer.numpy().data
    while remaining:
        count = os.preadv(handle, [remaining], offset)
        if not count:
            raise damaged_file(entry.file, f"it ends after {offset} bytes, inside {entry.name!r}")
        remaining, offset = remaining[count:], offset + count

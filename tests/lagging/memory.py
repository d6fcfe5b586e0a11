"""The memory of a lagging device, with an allocator that reuses a freed block at once, and pinned memory."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.lagging.streams import Access, Accessed, DeviceFault, Queues, Stream, Task

ALIGNMENT = 512  # bytes, as in torch's allocator
POISON = 255  # of every byte: NaN in float32, bfloat16 and float16, -1 as an integer


@dataclass(eq=False)
class Block(Accessed):
    """Memory of the device that is allocated and freed as a whole."""

    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    stream: int = 0  # on which it was allocated
    pool: object = None  # of graphs; None: of all other work
    lifetimes: int = 0  # how often it has been freed


class Memory:
    """An allocation: freed when no tensor refers to it any more."""

    def __init__(self, block: Block, freed: deque[Memory | Block]):
        self.block, self.freed = block, freed

    def __del__(self) -> None:
        self.freed.append(self.block)


class Allocator:
    """Reuses the block that was freed last, on the stream where it was allocated, like torch's allocator.

    Blocks of graphs come from their pool.
    """

    def __init__(self, queues: Queues):
        self.queues = queues
        self.free: dict[tuple[object, ...], list[Block]] = defaultdict(list)
        self.freed: deque[Memory | Block] = deque()
        self.count = 0
        self.reused = 0

    def allocate(self, size: int) -> Memory:
        stream, pool = self.queues.current_stream(), None
        if stream.capture:
            pool = stream.capture.pool
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        free = self.free[(pool, size) if pool is not None else (None, stream.id, size)]
        if free:
            self.reused += 1
            return Memory(free.pop(), self.freed)
        self.count += 1
        data = torch.full((size,), POISON, dtype=torch.uint8)
        return Memory(Block(f"block {self.count}", data=data, stream=stream.id, pool=pool), self.freed)

    def reclaim(self) -> None:
        """Take back freed blocks.

        Their content is poisoned in the order of the stream on which they were allocated, so that work of other
        streams that still uses them is found.
        """
        while self.freed:
            block = self.freed.popleft()
            assert isinstance(block, Block)
            block.lifetimes += 1
            task = Task(
                f"the next owner of {block.name}",
                lambda data=block.data: data.fill_(POISON),
                (Access(block, 0, len(block.data), writes=True),),
            )
            if block.pool is None:
                self.queues.submit(_plain(self.queues, block.stream), task)
                self.free[(None, block.stream, len(block.data))].append(block)
                continue
            capture = self.queues.capture()
            if capture and capture.pool is block.pool:
                capture.tasks.append(task)
            self.free[(block.pool, len(block.data))].append(block)


def _plain(queues: Queues, index: int) -> Stream:
    """Return a stream to poison memory on that no graph captures."""
    stream = queues.streams[index]
    return queues.streams[0] if stream.capture else stream


class PinnedMemory:
    """The host memory that is pinned, with the copies that read and write it."""

    def __init__(self, queues: Queues):
        self.queues = queues
        self.blocks: dict[int, tuple[object, Accessed, int]] = {}  # by storage: weak reference, block, address

    def pin(self, tensor: Tensor, poison: bool) -> Tensor:
        """Make a new tensor's memory pinned. poison: fill it, as nothing is in it"""
        if poison and tensor.numel():
            ctypes.memset(tensor.data_ptr(), POISON >> 1, tensor.numel() * tensor.element_size())
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = Accessed(f"pinned memory {len(self.blocks) + 1}")
        self.blocks[key] = (_WeakStorage(storage), block, storage.data_ptr())
        return tensor

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.pin(torch.empty(size, dtype=dtype), poison=True)

    def block_of(self, tensor: Tensor) -> Accessed | None:
        """Return the pinned block of a tensor on the host, None if it is pageable."""
        if not self.blocks:
            return None
        key = tensor.untyped_storage()._cdata
        if key not in self.blocks:
            return None
        weak, block, _ = self.blocks[key]
        assert isinstance(weak, _WeakStorage)
        if weak.expired():
            del self.blocks[key]
            return None
        return block

    def access(self, tensor: Tensor, writes: bool) -> Access | None:
        block = self.block_of(tensor)
        return None if block is None else Access(block, *byte_range(tensor), writes)

    def check_host(self, tensor: Tensor, writes: bool) -> None:
        """Raise DeviceFault if the host may not read or write a tensor now, because a copy may not have run."""
        access = self.access(tensor, writes)
        if access is None:
            return
        conflict = access.memory.conflict(access.begin, access.end, writes, self.queues.host_clock)
        if conflict:
            verb = "writes" if writes else "reads"
            raise self.queues.fault(f"the host {verb} {access.memory.name} before it has waited for {conflict}")


class _WeakStorage:
    def __init__(self, storage: torch.UntypedStorage):
        self.pointer = storage._weak_ref()

    def expired(self) -> bool:
        return torch.UntypedStorage._expired(self.pointer)

    def __del__(self, free=torch.UntypedStorage._free_weak_ref) -> None:
        free(self.pointer)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the first one behind it."""
    begin = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (span + 1) * tensor.element_size()


def check_unchanged(source: Tensor, before: Tensor, label: str) -> None:
    """Raise DeviceFault if a copy's source is not what it was when the copy was queued."""
    if not torch.equal(source.view(torch.uint8), before.view(torch.uint8)):
        raise DeviceFault(f"the pinned source of {label} was overwritten before the copy ran")

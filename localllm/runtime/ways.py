"""How bytes that were read get to a device: from pinned buffers by a GPU's stream, or copied at once on a CPU."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


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

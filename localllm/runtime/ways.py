"""How bytes that were read get to a device: from pinned buffers by a GPU's stream, or copied at once on a CPU."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Sent(Protocol):
    """A copy on its way to the device; torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Way(Protocol):
    """How bytes get to the device."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] on the host, to read into."""
        ...

    def room(self, size: int) -> Tensor:
        """uint8 [size] on the device. Called by the thread that takes tensors, as `arrived` is."""
        ...

    def send(self, target: Tensor, source: Tensor) -> Sent | None:
        """Begin to copy; None: it is done."""
        ...

    def arrived(self, sent: Iterable[Sent]) -> None:
        """What this thread does next on the device comes after these copies."""
        ...


class Streamed:
    """To a GPU, by a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def room(self, size: int) -> Tensor:
        room = torch.empty(size, dtype=torch.uint8, device=self.device)
        # What the allocator gives may have been another tensor's, of which work is still to be done.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return room

    def send(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            sent = torch.cuda.Event(blocking=True)
            sent.record(self.stream)
        return sent

    def arrived(self, sent: Iterable[Sent]) -> None:
        for event in sent:
            assert isinstance(event, torch.cuda.Event)
            torch.cuda.current_stream(self.device).wait_event(event)


class Copied:
    """To the CPU, by the thread that has read."""

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    room = buffer

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def arrived(self, sent: Iterable[Sent]) -> None:
        pass

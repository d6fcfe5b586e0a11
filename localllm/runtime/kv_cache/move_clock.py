"""Measures how many bytes blocks have when they move between the device and the host, and how long that takes."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from localllm.metrics import TierMove


class MoveClock:
    """On a GPU, copies are timed by events, which are read once the device has passed them; otherwise on the
    engine's thread, which executes them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.moves = {"device_to_host": TierMove(), "host_to_device": TierMove()}
        self.pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, dict[str, int]]] = deque()

    @contextmanager
    def measure(self, **nbytes: int) -> Iterator[None]:
        """Measure the copies within `with`. nbytes: their sizes by name of the move, which share the time"""
        if not any(nbytes.values()):
            yield
            return
        if self.device.type != "cuda":
            began = perf_counter()
            yield
            self.add(nbytes, perf_counter() - began)
            return
        self.collect()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        begin.record(stream)
        yield
        end.record(stream)
        self.pending.append((begin, end, nbytes))

    def collect(self) -> None:
        """Add the copies that the device has executed."""
        while self.pending and self.pending[0][1].query():
            begin, end, nbytes = self.pending.popleft()
            self.add(nbytes, begin.elapsed_time(end) / 1000)

    def add(self, nbytes: dict[str, int], seconds: float) -> None:
        total = sum(nbytes.values())
        for name, count in nbytes.items():
            if count:
                before = self.moves[name]
                self.moves[name] = TierMove(before.bytes + count, before.seconds + seconds * count / total)

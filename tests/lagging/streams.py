"""Queues of work, events and graphs, and which work is complete before which: vector clocks.

A clock maps a stream's id to the number of its tasks that are known to be complete. Each stream has one, for what
its next task waits for, and so has the host, for what it has waited for.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes

Clock = dict[int, int]
TESTS = Path(__file__).parent.parent
PRODUCT = TESTS.parent / "localllm"
HERE = str(Path(__file__).parent)
MAX_RUN = 12  # tasks that run at once at a random moment
MAX_HISTORY = 64  # accesses of one stream to one block that are listed; more are joined to one range


class DeviceFault(RuntimeError):
    """An error that a GPU would have shown at some timing, or always."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def caller() -> str:
    """Return the line of the product, or of a test, that is being executed."""
    frame: Any = sys._getframe(1)
    first = ""
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(str(PRODUCT)):
            return f"{file[len(str(PRODUCT)) + 1 :]}:{frame.f_lineno}"
        if not first and file.startswith(str(TESTS)) and (not file.startswith(HERE) or "test_" in file):
            first = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return first


@dataclass(frozen=True)
class PastAccess:
    begin: int
    end: int
    writes: bool
    index: int
    label: str


@dataclass(eq=False)
class Accessed:
    """Memory whose accesses are compared: a block of the device, or of pinned memory."""

    name: str
    history: dict[int, list[PastAccess]] = field(default_factory=dict)  # by stream

    def conflict(self, begin: int, end: int, writes: bool, known: Clock, own: int | None = None) -> str | None:
        """Return the label of an access that is not known to be complete and that this one must not overlap."""
        for stream, accesses in self.history.items():
            if stream == own:
                continue
            for past in accesses:
                overlaps = past.begin < end and begin < past.end
                if overlaps and (past.writes or writes) and past.index > known.get(stream, 0):
                    return past.label
        return None

    def record(self, stream: int, access: PastAccess) -> None:
        accesses = self.history.setdefault(stream, [])
        accesses[:] = [
            past
            for past in accesses
            if past.begin < access.begin or access.end < past.end or (past.writes and not access.writes)
        ]
        accesses.append(access)
        if len(accesses) > MAX_HISTORY:
            begin, end = min(a.begin for a in accesses), max(a.end for a in accesses)
            accesses[:] = [PastAccess(begin, end, any(a.writes for a in accesses), access.index, access.label)]


@dataclass(frozen=True)
class Access:
    memory: Accessed
    begin: int  # bytes
    end: int
    writes: bool


@dataclass
class Task:
    label: str
    run: Callable[[], object]
    accesses: Sequence[Access] = ()
    waits: Clock = field(default_factory=dict)
    check_replay: Callable[[], None] | None = None  # raises DeviceFault if a graph may not launch it now


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.queues = active()
        self.clock: Clock | None = None  # None: not recorded
        self.point = (0, 0)  # stream and task

    def record(self, stream: Stream | None = None) -> None:
        with self.queues.lock:
            stream = stream or self.queues.current_stream()
            if stream.capture:
                raise self.queues.fault("an event is recorded in a capture, which this device does not model")
            merge(stream.clock, self.queues.host_clock)
            self.clock, self.point = {**stream.clock, stream.id: stream.issued}, (stream.id, stream.issued)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.queues.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        with self.queues.lock:
            if self.clock is not None:
                self.queues.wait(self.clock, "Event.synchronize")

    def query(self) -> bool:
        with self.queues.lock:
            self.queues.forbid_in_capture("Event.query")
            if self.clock is None:
                return True
            done = self.queues.streams[self.point[0]].done >= self.point[1]
            if done:
                merge(self.queues.host_clock, self.clock)
            return done

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(self, device: object = None, priority: int = 0):
        self.queues = active()
        with self.queues.lock:
            self.id = len(self.queues.streams)
            self.queues.streams.append(self)
        self.tasks: deque[Task] = deque()
        self.issued = self.done = 0
        self.clock: Clock = {}  # what the next task waits for
        self.capture: Graph | None = None

    def wait_event(self, event: Event) -> None:
        with self.queues.lock:
            if event.clock is None:
                return
            if self.capture:
                raise self.queues.fault("a captured stream waits for an event, which this device does not model")
            merge(self.clock, event.clock)
            self.queues.submit(self, Task("wait_event", lambda: None, waits=dict(event.clock)))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        if stream is not self:
            self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        with self.queues.lock:
            self.queues.wait({**self.clock, self.id: self.issued}, "Stream.synchronize")

    def query(self) -> bool:
        return self.record_event().query()


class Graph:
    """Replaces torch.cuda.CUDAGraph: the tasks that were submitted during its capture."""

    def __init__(self, keep_graph: bool = False):
        self.queues = active()
        self.tasks: list[Task] = []
        self.pool: object = None
        self.stream: Stream | None = None
        self.broken: str | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        with self.queues.lock:
            self.stream = self.queues.current_stream()
            if self.stream is self.queues.streams[0]:
                raise self.queues.fault("a capture needs a stream of its own, not the default one")
            self.pool = object() if pool is None else pool
            if not self.queues.graphs.setdefault(self.pool, WeakSet([self])):
                raise self.queues.fault("the pool of a capture has ended with its last graph")
            self.queues.graphs[self.pool].add(self)
            self.stream.capture = self

    def capture_end(self) -> None:
        with self.queues.lock:
            assert self.stream
            self.queues.reclaim()
            self.stream.capture = None
            if self.broken:
                raise DeviceFault(f"the capture failed: {self.broken}")

    def replay(self) -> None:
        with self.queues.lock:
            self.queues.reclaim()
            for task in self.tasks:
                if task.check_replay:
                    task.check_replay()
                self.queues.submit(self.queues.current_stream(), task)
            self.queues.advance()


class Queues:
    """The streams of a device and the host's knowledge of them.

    seed: tasks run at random moments; None: when the host waits for them, which is the last moment.
    """

    def __init__(self, seed: int | None = None):
        self.lock = threading.RLock()
        self.random = None if seed is None else random.Random(seed)
        self.streams: list[Stream] = []
        self.host_clock: Clock = {}
        self.thread = threading.local()
        self.faults: list[str] = []
        self.graphs: dict[object, WeakSet[Graph]] = {}  # by memory pool
        self.waits: list[str] = []  # calls that made the host wait for the device

    def reclaim(self) -> None:
        """Return memory that the host has freed to the allocator."""

    def fault(self, message: str) -> DeviceFault:
        """Return the error to raise, which also fails the test if it is caught."""
        self.faults.append(f"{message} (at {caller()})")
        if capture := self.capture():
            capture.broken = capture.broken or self.faults[-1]
        return DeviceFault(self.faults[-1])

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self.thread, "stream", None) or self.streams[0]

    @contextmanager
    def use_stream(self, stream: Stream | None) -> Iterator[None]:
        before = getattr(self.thread, "stream", None)
        self.thread.stream = stream or before
        try:
            yield
        finally:
            self.thread.stream = before

    def capture(self) -> Graph | None:
        """Return the graph that this thread captures."""
        return self.current_stream().capture

    def forbid_in_capture(self, call: str) -> None:
        if self.capture():
            raise self.fault(f"{call} is not permitted while a graph is captured")

    def submit(self, stream: Stream, task: Task) -> None:
        """Queue a task, or record it in the graph that the stream captures."""
        if stream.capture:
            stream.capture.tasks.append(task)
            return
        stream.issued += 1
        known = stream.clock
        merge(known, self.host_clock)
        label = f"{task.label}, stream {stream.id}"
        for access in task.accesses:
            other = access.memory.conflict(access.begin, access.end, access.writes, known, stream.id)
            if other:
                raise self.fault(f"{label} and {other} access {access.memory.name} without an order")
        for access in task.accesses:
            access.memory.record(
                stream.id, PastAccess(access.begin, access.end, access.writes, stream.issued, label)
            )
        stream.tasks.append(task)

    def advance(self) -> None:
        """Run some tasks if this is one of the random moments."""
        if self.random and self.random.random() < 0.25:
            stream = self.random.choice(self.streams)
            self.run(stream, min(stream.issued, stream.done + self.random.randrange(MAX_RUN)))

    def wait(self, clock: Clock, call: str) -> None:
        """Make the host wait for the tasks of a clock."""
        self.forbid_in_capture(call)
        self.waits.append(f"{call} at {caller()}")
        for stream, count in clock.items():
            self.run(self.streams[stream], count)
        merge(self.host_clock, clock)

    def wait_for_stream(self, call: str) -> None:
        """Make the host wait for the current stream."""
        stream = self.current_stream()
        self.forbid_in_capture(call)
        self.wait({**stream.clock, stream.id: stream.issued}, call)

    def synchronize(self, device: object = None) -> None:
        """Replaces torch.cuda.synchronize."""
        with self.lock:
            self.wait({stream.id: stream.issued for stream in self.streams}, "torch.cuda.synchronize")

    def run(self, stream: Stream, count: int) -> None:
        """Execute the stream's tasks up to this one, and all tasks of other streams that they wait for."""
        if stream.done >= count:
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            self.run_in_order(stream, count)

    def run_in_order(self, stream: Stream, count: int) -> None:
        while stream.done < count:
            task = stream.tasks.popleft()
            stream.done += 1
            for other, needed in task.waits.items():
                if other != stream.id:
                    self.run_in_order(self.streams[other], needed)
            try:
                task.run()
            except DeviceFault as error:
                self.faults.append(str(error))
                raise
            except Exception as error:
                self.faults.append(f"{task.label} failed: {error}")
                raise DeviceFault(self.faults[-1]) from error


_active: list[Queues] = []


def active() -> Queues:
    """Return the device that is in use."""
    return _active[-1]

"""A model on its way, opened by a thread of its own, and how far it is: the screen looks, and never waits.

Knows nothing of Textual.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.errors import LocalLLMError
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import Order
from localllm.model import Model
from localllm.tui.machine import Cancelled, Machine, Offer

DOWNLOAD, QUANTIZE = "download", "quantize"


@dataclass
class Coming:
    """A file of a download. Sizes are bytes, times seconds of the opening's clock."""

    path: str
    size: int
    done: int  # that are here
    began: float | None = None  # when its first bytes came
    came: int = 0  # since then
    verified: bool = False

    def rate(self, now: float) -> float | None:
        """Bytes a second."""
        if self.began is None or not self.came or now <= self.began:
            return None
        return self.came / (now - self.began)


@dataclass
class Phase:
    name: str
    began: float
    ended: float | None = None
    done: int = 0
    total: int = 0  # 0: nothing is told of how far it is


@dataclass(eq=False)
class Opening:
    """`Watch` of a model. What it is told stands in its fields; `model` or `fault` is there once `over` is."""

    machine: Machine
    name: str
    clock: Callable[[], float] = time.perf_counter
    offer: Offer | None = None
    files: dict[str, Coming] = field(default_factory=dict)  # by digest, those that are not here yet
    here_bytes: int = 0  # of the download, which were here before
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: Model | None = None
    fault: Exception | None = None
    over: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.began = self.clock()
        self.thread = threading.Thread(target=self.run, name="localllm-open", daemon=True)
        self.thread.start()

    def run(self) -> None:
        model, fault = None, None
        try:
            model = self.machine.open(self.name, self)
        except Cancelled:
            pass
        except (LocalLLMError, OSError) as error:
            fault = error
        except Exception as error:  # a fault of ours is told as one, and ends nothing else
            fault = LocalLLMError(f"{type(error).__name__}: {error}", "this is a fault of localllm")
        if fault:
            fault.__cause__ = fault.__context__ = fault.__traceback__ = None  # frames would keep what was loaded
        with self.lock:
            self.end_phase()
            late = model if self.cancelled else None
            self.model = None if self.cancelled else model
            self.fault = fault
            self.over = True
        if late:
            late.close()

    def take(self) -> Model | None:
        """The model that is ready: the caller's from now on."""
        with self.lock:
            model, self.model = self.model, None
            return model

    def cancel(self) -> None:
        """Break it off; what nobody took is closed."""
        with self.lock:
            self.cancelled = True
        if ready := self.take():
            ready.close()

    @property
    def under_way(self) -> str | None:
        """The phase that it is in."""
        return self.phases[-1].name if self.phases and self.phases[-1].ended is None else None

    @property
    def pull(self) -> "Opening":
        return self

    def go_on(self) -> None:
        if self.cancelled:
            raise Cancelled

    def about(self, offer: Offer) -> None:
        self.go_on()
        self.offer = offer

    def phase(self, name: str) -> None:
        self.go_on()
        if self.under_way != name:
            self.end_phase()
            self.phases.append(Phase(name, self.clock()))

    def end_phase(self) -> None:
        if self.under_way:
            self.phases[-1].ended = self.clock()

    def part(self, done: int, total: int) -> None:
        self.go_on()
        self.phases[-1].done, self.phases[-1].total = done, total

    def note(self, text: str) -> None:
        self.go_on()
        self.notes.append(text)

    def begin(self, order: Order) -> None:
        self.go_on()
        contents = [same[0] for same in order.contents.values()]
        self.here_bytes = sum(file.size for file in contents if order.here[file.digest] == file.size)
        self.files = {
            file.digest: Coming(file.path, file.size, order.here[file.digest])
            for file in contents
            if order.here[file.digest] < file.size
        }

    def advance(self, file: RemoteFile, count: int) -> None:
        self.go_on()
        if coming := self.files.get(file.digest):
            with self.lock:
                coming.began = self.clock() if coming.began is None else coming.began
                coming.done += count
                coming.came += max(0, count)  # what is less than none has to come again

    def finish(self, file: RemoteFile) -> None:
        """Another process may have fetched it."""
        self.go_on()
        if coming := self.files.get(file.digest):
            coming.done, coming.verified = coming.size, True

    def say(self, text: str) -> None:
        self.note(text)

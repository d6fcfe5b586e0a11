"""A model on its way, opened by a thread of its own, and how far it is: the screen looks, and never waits.

Knows nothing of Textual.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.errors import LocalLLMError
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import PullPlan
from localllm.protocol.model import Model
from localllm.tui.machine import Cancelled, Machine, ModelOffer

DOWNLOAD, QUANTIZE = "download", "quantize"


@dataclass
class FileDownload:
    """A file of a download. Sizes are bytes, times seconds of the opening's clock."""

    path: str
    size_bytes: int
    done_bytes: int  # that are here
    began: float | None = None  # when its first bytes came
    received_bytes: int = 0  # since then
    verified: bool = False

    def rate(self, now: float) -> float | None:
        """Bytes a second."""
        if self.began is None or not self.received_bytes or now <= self.began:
            return None
        return self.received_bytes / (now - self.began)


@dataclass
class Phase:
    name: str
    began: float
    ended: float | None = None
    done: int = 0
    total: int = 0  # 0: nothing is told of how far it is


@dataclass(eq=False)
class LoadTask:
    """`Watch` of a model. What it is told stands in its fields; `model` or `fault` is there once `over` is."""

    machine: Machine
    name: str
    clock: Callable[[], float] = time.perf_counter
    offer: ModelOffer | None = None
    files: dict[str, FileDownload] = field(default_factory=dict)  # by digest, those that are not here yet
    here_bytes: int = 0  # of the download, which were here before
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: Model | None = None
    error: Exception | None = None
    finished: bool = False
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
            self.error = fault
            self.finished = True
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
    def current_phase(self) -> str | None:
        """The phase that it is in."""
        return self.phases[-1].name if self.phases and self.phases[-1].ended is None else None

    @property
    def pull(self) -> "LoadTask":
        return self

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise Cancelled

    def about(self, offer: ModelOffer) -> None:
        self.raise_if_cancelled()
        self.offer = offer

    def phase(self, name: str) -> None:
        self.raise_if_cancelled()
        if self.current_phase != name:
            self.end_phase()
            self.phases.append(Phase(name, self.clock()))

    def end_phase(self) -> None:
        if self.current_phase:
            self.phases[-1].ended = self.clock()

    def part(self, done: int, total: int) -> None:
        self.raise_if_cancelled()
        self.phases[-1].done, self.phases[-1].total = done, total

    def note(self, text: str) -> None:
        self.raise_if_cancelled()
        self.notes.append(text)

    def begin(self, order: PullPlan) -> None:
        self.raise_if_cancelled()
        contents = [same[0] for same in order.contents.values()]
        self.here_bytes = sum(file.size for file in contents if order.cached_bytes[file.digest] == file.size)
        self.files = {
            file.digest: FileDownload(file.path, file.size, order.cached_bytes[file.digest])
            for file in contents
            if order.cached_bytes[file.digest] < file.size
        }

    def advance(self, file: RemoteFile, count: int) -> None:
        self.raise_if_cancelled()
        if coming := self.files.get(file.digest):
            with self.lock:
                coming.began = self.clock() if coming.began is None else coming.began
                coming.done_bytes += count
                coming.received_bytes += max(0, count)  # what is less than none has to come again

    def finish(self, file: RemoteFile) -> None:
        """Another process may have fetched it."""
        self.raise_if_cancelled()
        if coming := self.files.get(file.digest):
            coming.done_bytes, coming.verified = coming.size_bytes, True

    def say(self, text: str) -> None:
        self.note(text)

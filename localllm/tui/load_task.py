"""Opens a model on a thread of its own and records the progress, so that the screen never waits.

Sizes are in bytes; times are in seconds of the task's clock. Independent of Textual.
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
    """Progress of one file of a download."""

    path: str
    size_bytes: int
    done_bytes: int  # including those of an earlier, interrupted download
    began: float | None = None  # time of its first bytes
    received_bytes: int = 0  # by this task
    verified: bool = False

    def rate(self, now: float) -> float | None:
        """Return bytes per second, None before the first ones."""
        if self.began is None or not self.received_bytes or now <= self.began:
            return None
        return self.received_bytes / (now - self.began)


@dataclass
class Phase:
    """A phase of opening a model, such as `download`."""

    name: str
    began: float
    ended: float | None = None
    done: int = 0
    total: int = 0  # 0 if the phase reports no progress


@dataclass(eq=False)
class LoadTask:
    """Opens a model as its `LoadObserver`. Once `finished`, `model` or `error` is set, or neither if cancelled."""

    machine: Machine
    name: str
    clock: Callable[[], float] = time.perf_counter
    offer: ModelOffer | None = None
    files: dict[str, FileDownload] = field(default_factory=dict)  # by digest, those to be downloaded
    here_bytes: int = 0  # files of the download that were complete before
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
        model, error = None, None
        try:
            model = self.machine.open(self.name, self)
        except Cancelled:
            pass
        except (LocalLLMError, OSError) as caught:
            error = caught
        except Exception as caught:  # shown on the screen like any other error
            error = LocalLLMError(f"{type(caught).__name__}: {caught}", "this is a bug in localllm")
        if error:
            error.__cause__ = error.__context__ = error.__traceback__ = None  # frames would keep weights alive
        with self.lock:
            self.end_phase()
            unwanted = model if self.cancelled else None
            self.model = None if self.cancelled else model
            self.error = error
            self.finished = True
        if unwanted:
            unwanted.close()

    def take(self) -> Model | None:
        """Return the model once it is ready, and leave closing it to the caller."""
        with self.lock:
            model, self.model = self.model, None
            return model

    def cancel(self) -> None:
        """Stop opening the model, and close it if it is ready and not taken."""
        with self.lock:
            self.cancelled = True
        if ready := self.take():
            ready.close()

    @property
    def current_phase(self) -> str | None:
        """Name of the current phase, None between phases."""
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
        if download := self.files.get(file.digest):
            with self.lock:
                download.began = self.clock() if download.began is None else download.began
                download.done_bytes += count
                download.received_bytes += max(0, count)  # negative: a part has to be fetched again

    def finish(self, file: RemoteFile) -> None:
        """Mark a file as verified, including one that another process has downloaded."""
        self.raise_if_cancelled()
        if download := self.files.get(file.digest):
            download.done_bytes, download.verified = download.size_bytes, True

    def say(self, text: str) -> None:
        self.note(text)

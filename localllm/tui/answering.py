"""An answer on its way from a thread that waits for it to the screen, which must never wait.

The engine may bring hundreds of tokens a second and a screen is drawn thirty times: what came since is handed over
together, once a frame. Knows nothing of Textual.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.conversation.chat import AnswerEvents
from localllm.request import GenerationEvent

JOIN_INTERVAL_S = 0.05
TimedEvent = tuple[float, GenerationEvent]  # when, in seconds of `time.perf_counter()`


@dataclass(frozen=True)
class AnswerEnd:
    """stopped: by the person; error: what ended it before its time."""

    stopped: bool
    error: Exception | None = None


class AnswerObserver(Protocol):
    """A part of the screen that shows an answer under way, called on the screen's thread."""

    def begin(self, began: float) -> None:
        """began: in seconds of `time.perf_counter()`."""
        ...

    def follow(self, events: Sequence[TimedEvent]) -> None: ...
    def end(self, outcome: AnswerEnd) -> None: ...


class AnswerThread:
    """One answer under way. `began` is in seconds of `time.perf_counter()`."""

    def __init__(self, ask: Callable[[], AnswerEvents], stop: Callable[[], None]):
        """ask: begins the answer, on this answer's own thread; stop: ends it at once, from any thread, as far as
        it has begun."""
        self.ask = ask
        self.end = stop
        self.began = time.perf_counter()
        self.pending: deque[TimedEvent] = deque()
        self.outcome: AnswerEnd | None = None
        self.stopping = False
        self.thread = threading.Thread(target=self.run, name="localllm-answer", daemon=True)
        self.thread.start()

    def run(self) -> None:
        error: Exception | None = None
        try:
            events = self.ask()
            try:
                while not self.stopping and (event := next(events, None)):
                    self.pending.append((time.perf_counter(), event))
            finally:
                events.close()
        except Exception as fault:  # shown to the person, whatever it is
            error = fault
        self.outcome = AnswerEnd(self.stopping, error)

    def drain(self) -> tuple[list[TimedEvent], AnswerEnd | None]:
        """What came since the last call, and how it ended if it has: then nothing comes after."""
        ended = self.outcome  # first: what came before the end is then there
        if self.stopping and ended is None:
            self.end()  # it may have begun just after it was stopped
        return [self.pending.popleft() for _ in range(len(self.pending))], ended

    def stop(self) -> None:
        """At once; what was said stays."""
        self.stopping = True
        self.end()

    def stop_and_join(self, timeout_s: float) -> None:
        """Stop it, and wait for its end; timeout_s: no longer than this."""
        self.stop()
        limit = time.perf_counter() + timeout_s
        while self.thread.is_alive() and time.perf_counter() < limit:
            self.end()  # it may have begun just after it was stopped
            self.thread.join(JOIN_INTERVAL_S)

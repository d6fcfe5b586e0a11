"""Reads an answer on a thread of its own, so that the screen never waits for the model.

The engine may send hundreds of events per second while a screen is drawn thirty times: `drain` returns them in
batches, once per frame. Independent of Textual.
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
TimedEvent = tuple[float, GenerationEvent]  # with its time of receipt, in seconds of `time.perf_counter()`


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer. stopped: by the user; error: what aborted it."""

    stopped: bool
    error: Exception | None = None


class AnswerObserver(Protocol):
    """A widget that shows the answer under way. Its methods are called on the screen's thread."""

    def begin(self, began: float) -> None:
        """began: in seconds of `time.perf_counter()`"""
        ...

    def follow(self, events: Sequence[TimedEvent]) -> None: ...
    def end(self, outcome: AnswerEnd) -> None: ...


class AnswerThread:
    """One answer under way. `began` is in seconds of `time.perf_counter()`."""

    def __init__(self, ask: Callable[[], AnswerEvents], stop: Callable[[], None]):
        """ask: starts the answer, called on the new thread; stop: ends it immediately, from any thread; no effect
        before the answer has started
        """
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
        except Exception as caught:  # shown to the user, whatever it is
            error = caught
        self.outcome = AnswerEnd(self.stopping, error)

    def drain(self) -> tuple[list[TimedEvent], AnswerEnd | None]:
        """Return the events since the last call, and the outcome once all events are returned."""
        outcome = self.outcome  # read first: all events before the end are then in the queue
        if self.stopping and outcome is None:
            self.end()  # the answer may have started just after `stop`
        return [self.pending.popleft() for _ in range(len(self.pending))], outcome

    def stop(self) -> None:
        """Stop immediately; the text so far is kept."""
        self.stopping = True
        self.end()

    def stop_and_join(self, timeout_s: float) -> None:
        """Stop, and wait at most `timeout_s` for the thread to end."""
        self.stop()
        limit = time.perf_counter() + timeout_s
        while self.thread.is_alive() and time.perf_counter() < limit:
            self.end()  # the answer may have started just after `stop`
            self.thread.join(JOIN_INTERVAL_S)

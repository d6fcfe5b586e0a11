"""The numbers under a conversation: of the answer under way, and dimmed of the last one until the next."""

import time
from collections.abc import Callable, Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from localllm.protocol.model import Model
from localllm.tui.answering import AnswerEnd, TimedEvent
from localllm.tui.metrics.cells import render_metrics
from localllm.tui.metrics.live import IDLE_NUMBERS, AnswerPhase, LiveMetrics, LiveNumbers

FRAME_S = 1 / 30


class MetricsStrip(Widget):
    """Two lines, drawn anew at most thirty times a second, and not at all while nothing changes."""

    DEFAULT_CSS = """
    MetricsStrip {
        height: 2;
        padding: 0 1;
        text-wrap: nowrap;
        text-overflow: clip;
        &.-idle { text-style: dim; }
    }
    """

    numbers: reactive[LiveNumbers] = reactive(IDLE_NUMBERS)

    def __init__(self, model: Model, clock: Callable[[], float] = time.perf_counter):
        """clock: what the times of events are by."""
        super().__init__(classes="-idle")
        self.model = model
        self.clock = clock
        self.live: LiveMetrics | None = None
        self.frames: Timer | None = None

    def on_mount(self) -> None:
        self.frames = self.set_interval(FRAME_S, self.update_numbers, pause=self.live is None)

    def begin(self, began: float) -> None:
        self.live = LiveMetrics(began, self.model.reads)
        self.update_numbers()
        if self.frames:
            self.frames.resume()

    def follow(self, events: Sequence[TimedEvent]) -> None:
        if self.live:
            self.live.follow(events)

    def end(self, outcome: AnswerEnd) -> None:
        if self.frames:
            self.frames.pause()
        if self.live:
            self.live.end()
        self.update_numbers()

    def update_numbers(self) -> None:
        if self.live:
            self.numbers = self.live.numbers(self.clock())

    def watch_numbers(self, before: LiveNumbers, after: LiveNumbers) -> None:
        self.set_class(after.phase in (AnswerPhase.IDLE, AnswerPhase.ENDED), "-idle")

    def render(self) -> Content:
        return render_metrics(self.numbers, self.model.context, self.size.width)

"""The numbers under a conversation: of the answer under way, and dimmed of the last one until the next."""

import time
from collections.abc import Callable, Sequence

from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget

from localllm.model import Model
from localllm.tui.answering import Came, Ended
from localllm.tui.metrics.cells import lines
from localllm.tui.metrics.live import IDLE, Live, Numbers, Phase

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

    numbers: reactive[Numbers] = reactive(IDLE)

    def __init__(self, model: Model, clock: Callable[[], float] = time.perf_counter):
        """clock: what the times of events are by."""
        super().__init__(classes="-idle")
        self.model = model
        self.clock = clock
        self.live: Live | None = None
        self.frames: Timer | None = None

    def on_mount(self) -> None:
        self.frames = self.set_interval(FRAME_S, self.show, pause=self.live is None)

    def begin(self, began: float) -> None:
        self.live = Live(began, self.model.reads)
        self.show()
        if self.frames:
            self.frames.resume()

    def follow(self, came: Sequence[Came]) -> None:
        if self.live:
            self.live.follow(came)

    def end(self, ended: Ended) -> None:
        if self.frames:
            self.frames.pause()
        if self.live:
            self.live.end()
        self.show()

    def show(self) -> None:
        if self.live:
            self.numbers = self.live.numbers(self.clock())

    def watch_numbers(self, before: Numbers, after: Numbers) -> None:
        self.set_class(after.phase in (Phase.IDLE, Phase.ENDED), "-idle")

    def render(self) -> Content:
        return lines(self.numbers, self.model.context, self.size.width)

"""An app with only the inspector and the metrics strip, with scripted answers and a scripted clock."""

from collections.abc import Sequence

from textual.app import App

from localllm.tui.answer_thread import AnswerEnd, TimedEvent
from localllm.tui.inspector.panel import Inspector
from localllm.tui.metrics_strip import MetricsStrip
from tests.tui.scripted_events import FakeModel


class Inspected(App[None]):
    def __init__(self, *answers: Sequence[TimedEvent], ended: bool = True):
        """ended: whether the last answer has ended; otherwise it is running at the time of its last piece."""
        super().__init__()
        self.answers = answers
        self.ended = ended
        self.inspector = Inspector(FakeModel())
        self.strip = MetricsStrip(FakeModel(), clock=lambda: self.now)
        self.now = 100.0

    def compose(self):
        yield self.inspector
        yield self.strip

    def on_mount(self) -> None:
        self.inspector.toggle()
        self.inspector.focus_view()
        for place, answer in enumerate(self.answers, 1):
            self.begin()
            self.tell(answer)
            if self.ended or place < len(self.answers):
                self.end()

    def begin(self) -> None:
        for watcher in (self.inspector, self.strip):
            watcher.begin(100.0)

    def tell(self, came: Sequence[TimedEvent]) -> None:
        self.now = came[-1][0] if came else self.now
        for watcher in (self.inspector, self.strip):
            watcher.follow(came)

    def end(self) -> None:
        for watcher in (self.inspector, self.strip):
            watcher.end(AnswerEnd(False))

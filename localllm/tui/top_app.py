"""`localllm top` on a terminal: a running server, looked at again and again."""

import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Static

from localllm.errors import LocalLLMError
from localllm.formatting import format_rate, one_line
from localllm.tui import top_board
from localllm.tui.drawing import round_up_scale, sparkline
from localllm.tui.themes import use_ansi_colors
from localllm.tui.top_board import ModelSnapshot, ServerSnapshot, Throughput, throughput_between

MAX_HISTORY = 512  # looks
MAX_SLOTS = 12
SPARKLINE_CELLS = 28  # of the speeds before, at 80 columns
WIDE_MIN_COLUMNS = 120

FetchSnapshot = Callable[[], ServerSnapshot]


class ModelBoard(Static):
    """What one model does."""

    DEFAULT_CSS = "ModelBoard { padding: 1 1 0 1; }"

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.decode: deque[float] = deque(maxlen=MAX_HISTORY)
        self.prefill: deque[float] = deque(maxlen=MAX_HISTORY)

    def update_model(self, model: ModelSnapshot, now: Throughput | None) -> None:
        if now:
            self.decode.append(now.output_per_s)
            self.prefill.append(now.prefill_per_s)
        title = Content.styled(top_board.model_line(model, time.time()), "bold")
        slots = top_board.slot_lines(model.slots, MAX_SLOTS)
        rows = [
            title,
            *self.speeds(),
            top_board.load_line(model),
            *top_board.latency_lines(model),
            *top_board.cache_lines(model),
            "",
            *slots,
        ]
        self.update(Content("\n").join([Content(row) if isinstance(row, str) else row for row in rows]))

    def speeds(self) -> list[Content]:
        lines: list[Content] = []
        ticks = SPARKLINE_CELLS if self.app.size.width < WIDE_MIN_COLUMNS else SPARKLINE_CELLS * 2
        for name, values in (("decode", self.decode), ("prefill", self.prefill)):
            shown = list(values)[-ticks:]
            now = format_rate(shown[-1]) if shown else "-"
            drawn = sparkline(shown, ticks, top=round_up_scale(max(shown, default=0.0)), style="$accent")
            lines.append(Content.assemble(f"{name:<8}{now:<18}", drawn))
        return lines


class TopApp(App[int]):
    """look: asks the server, from a thread; every: seconds between two looks. Gives its exit code."""

    CSS = """
    #head { dock: top; height: 1; padding: 0 1; background: $panel; }
    #trouble { padding: 1; color: $error; }
    """
    BINDINGS: ClassVar = [
        Binding("q,escape", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("plus,equals_sign", "faster", "More often", key_display="+"),
        Binding("minus", "slower", "Less often", key_display="-"),
    ]
    ENABLE_COMMAND_PALETTE = False
    FASTEST_S, SLOWEST_S = 0.25, 16.0

    def __init__(self, look: FetchSnapshot, url: str, every: float = 1.0):
        super().__init__(ansi_color=use_ansi_colors())
        self.fetch_snapshot = look
        self.url = url
        self.interval_s = every
        self.previous: ServerSnapshot | None = None
        self.boards: dict[str, ModelBoard] = {}
        self.paused = False

    def compose(self) -> ComposeResult:
        yield Static(f"asking {self.url} …", id="head", markup=False)
        with VerticalScroll(id="boards"):
            yield Static("", id="trouble", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#trouble").display = False
        self.schedule_fetch()

    def schedule_fetch(self) -> None:
        """One look at a time: a server that is slow to answer is not asked twice."""
        self.run_worker(self.fetch, thread=True)

    def fetch(self) -> None:
        try:
            glance = None if self.paused else self.fetch_snapshot()
        except LocalLLMError as error:
            self.call_from_thread(self.show_error, str(error))
        else:
            if glance:
                self.call_from_thread(self.show_snapshot, glance)
        self.call_from_thread(self.set_timer, self.interval_s, self.schedule_fetch)

    def show_error(self, text: str) -> None:
        """It is asked again: a server may come back."""
        shown = self.query_one("#trouble", Static)
        shown.update(one_line(text))
        shown.display = True

    def show_snapshot(self, glance: ServerSnapshot) -> None:
        self.query_one("#trouble").display = False
        paused = "   paused" if self.paused else ""
        self.query_one("#head", Static).update(top_board.server_line(glance, self.url) + paused)
        column = self.query_one("#boards")
        for gone in self.boards.keys() - {model.name for model in glance.models}:
            self.boards.pop(gone).remove()
        for model in glance.models:
            if model.name not in self.boards:
                self.boards[model.name] = ModelBoard()
                column.mount(self.boards[model.name])
            self.boards[model.name].update_model(model, throughput_between(self.previous, glance, model.name))
        if not glance.models:
            loading = ", ".join(glance.loading)
            self.show_error(
                f"{loading} is being loaded" if loading else "no model is loaded: whoever asks loads one"
            )
        self.previous = glance

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.notify("paused" if self.paused else "goes on", timeout=1)

    def action_faster(self) -> None:
        self.set_interval_s(self.interval_s / 2)

    def action_slower(self) -> None:
        self.set_interval_s(self.interval_s * 2)

    def set_interval_s(self, every: float) -> None:
        self.interval_s = min(max(every, self.FASTEST_S), self.SLOWEST_S)
        self.notify(f"every {self.interval_s:g} s", timeout=1)

    async def action_quit(self) -> None:
        self.exit(0)

"""`localllm top` in a terminal: a live view of a running server."""

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

MAX_HISTORY = 512  # snapshots
MAX_SLOTS = 12
SPARKLINE_CELLS = 28  # in a narrow window
WIDE_MIN_COLUMNS = 120

FetchSnapshot = Callable[[], ServerSnapshot]


class TopApp(App[int]):
    """Polls the server and shows a board for each model. Returns the exit code."""

    CSS = """
    #head { dock: top; height: 1; padding: 0 1; background: $panel; }
    #error { padding: 1; color: $error; }
    """
    BINDINGS: ClassVar = [
        Binding("q,escape", "quit", "Quit"),
        Binding("space", "pause", "Pause"),
        Binding("plus,equals_sign", "faster", "Faster", key_display="+"),
        Binding("minus", "slower", "Slower", key_display="-"),
    ]
    ENABLE_COMMAND_PALETTE = False
    FASTEST_S, SLOWEST_S = 0.25, 16.0

    def __init__(self, fetch_snapshot: FetchSnapshot, url: str, interval_s: float = 1.0):
        """fetch_snapshot: queries the server, called on a thread; interval_s: between two snapshots"""
        super().__init__(ansi_color=use_ansi_colors())
        self.fetch_snapshot = fetch_snapshot
        self.url = url
        self.interval_s = interval_s
        self.previous: ServerSnapshot | None = None
        self.boards: dict[str, ModelBoard] = {}
        self.paused = False

    def compose(self) -> ComposeResult:
        yield Static(f"connecting to {self.url} …", id="head", markup=False)
        with VerticalScroll(id="boards"):
            yield Static("", id="error", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#error").display = False
        self.schedule_fetch()

    def schedule_fetch(self) -> None:
        """Fetch one snapshot at a time, so that a slow server has one request at most."""
        self.run_worker(self.fetch, thread=True)

    def fetch(self) -> None:
        try:
            snapshot = None if self.paused else self.fetch_snapshot()
        except LocalLLMError as error:
            self.call_from_thread(self.show_error, str(error))
        else:
            if snapshot:
                self.call_from_thread(self.show_snapshot, snapshot)
        self.call_from_thread(self.set_timer, self.interval_s, self.schedule_fetch)

    def show_error(self, text: str) -> None:
        """Show an error until the next snapshot: the server may come back."""
        error = self.query_one("#error", Static)
        error.update(one_line(text))
        error.display = True

    def show_snapshot(self, snapshot: ServerSnapshot) -> None:
        self.query_one("#error").display = False
        paused = "   paused" if self.paused else ""
        self.query_one("#head", Static).update(top_board.server_line(snapshot, self.url) + paused)
        column = self.query_one("#boards")
        for unloaded in self.boards.keys() - {model.name for model in snapshot.models}:
            self.boards.pop(unloaded).remove()
        for model in snapshot.models:
            if model.name not in self.boards:
                self.boards[model.name] = ModelBoard()
                column.mount(self.boards[model.name])
            self.boards[model.name].update_model(model, throughput_between(self.previous, snapshot, model.name))
        if not snapshot.models:
            loading = ", ".join(snapshot.loading)
            self.show_error(f"loading {loading}" if loading else "no model is loaded; the next request loads one")
        self.previous = snapshot

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.notify("paused" if self.paused else "resumed", timeout=1)

    def action_faster(self) -> None:
        self.set_interval_s(self.interval_s / 2)

    def action_slower(self) -> None:
        self.set_interval_s(self.interval_s * 2)

    def set_interval_s(self, interval_s: float) -> None:
        self.interval_s = min(max(interval_s, self.FASTEST_S), self.SLOWEST_S)
        self.notify(f"every {self.interval_s:g} s", timeout=1)

    async def action_quit(self) -> None:
        self.exit(0)


class ModelBoard(Static):
    """The load, speed and requests of one model."""

    DEFAULT_CSS = "ModelBoard { padding: 1 1 0 1; }"

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.decode: deque[float] = deque(maxlen=MAX_HISTORY)
        self.prefill: deque[float] = deque(maxlen=MAX_HISTORY)

    def update_model(self, model: ModelSnapshot, throughput: Throughput | None) -> None:
        if throughput:
            self.decode.append(throughput.output_per_s)
            self.prefill.append(throughput.prefill_per_s)
        title = Content.styled(top_board.model_line(model, time.time()), "bold")
        slots = top_board.slot_lines(model.slots, MAX_SLOTS)
        rows = [
            title,
            *self.speed_lines(),
            top_board.load_line(model),
            *top_board.latency_lines(model),
            *top_board.cache_lines(model),
            "",
            *slots,
        ]
        self.update(Content("\n").join([Content(row) if isinstance(row, str) else row for row in rows]))

    def speed_lines(self) -> list[Content]:
        lines: list[Content] = []
        cells = SPARKLINE_CELLS if self.app.size.width < WIDE_MIN_COLUMNS else SPARKLINE_CELLS * 2
        for name, values in (("decode", self.decode), ("prefill", self.prefill)):
            recent = list(values)[-cells:]
            rate = format_rate(recent[-1]) if recent else "-"
            ticks = sparkline(recent, cells, top=round_up_scale(max(recent, default=0.0)), style="$accent")
            lines.append(Content.assemble(f"{name:<8}{rate:<18}", ticks))
        return lines

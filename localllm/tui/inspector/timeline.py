"""The time line: queue, pieces of the prompt, every step as a tick, gaps, and where drafts were verified."""

import math
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.events import Click, MouseScrollDown, MouseScrollUp

from localllm.metrics import percentile
from localllm.tui.inspector.drawn import Drawn
from localllm.tui.inspector.flow import MARKS, signs
from localllm.tui.inspector.lanes import (
    DIM,
    MARGIN,
    RIGHT,
    WRITES,
    WRONG,
    Bins,
    chart,
    named,
    prompt_row,
)
from localllm.tui.inspector.record import Guess, Record, Step, Token
from localllm.tui.inspector.scale import Scale
from localllm.tui.sparkline import nice_top
from localllm.units import rate, seconds

ABOUT = "Every step of the engine, and how long each took. ← → choose one, + - zoom."
MOST_ZOOM = 16
TYPICAL = 512  # steps that the scale of their times is by


class TimeLine(Drawn, can_focus=True):
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "Step before", show=False),
        Binding("right", "move(1)", "Step after", show=False),
        Binding("pageup", "move(-20)", "20 before", show=False),
        Binding("pagedown", "move(20)", "20 after", show=False),
        Binding("home", "first", "First step", show=False),
        Binding("end", "newest", "Newest step", show=False),
        Binding("plus,equals_sign", "zoom(1)", "Closer", show=False),
        Binding("minus", "zoom(-1)", "Farther", show=False),
    ]

    def __init__(self, record: Record):
        super().__init__(id="timeline")
        self.record = record
        self.zoom = 0
        self.chosen: int | None = None  # counted from the first step of all; None: the newest

    def show(self, record: Record) -> None:
        """Another answer, or more of the same."""
        if record is not self.record:
            self.record, self.zoom, self.chosen = record, 0, None
        self.refresh()

    @property
    def steps(self) -> list[Step]:
        return [*self.record.pieces, *self.record.steps]

    @property
    def place(self) -> int:
        """Of the step that is looked at, in `steps`; -1 where there is none."""
        last = len(self.steps) - 1
        return last if self.chosen is None else max(0, min(self.chosen - self.record.gone_steps, last))

    def action_move(self, by: int) -> None:
        self.choose(self.place + by)

    def choose(self, place: int) -> None:
        place = max(place, 0)
        newest = place >= len(self.steps) - 1
        self.chosen = None if newest else place + self.record.gone_steps
        self.refresh()

    def action_first(self) -> None:
        self.choose(0)

    def action_newest(self) -> None:
        self.choose(len(self.steps))

    def action_zoom(self, by: int) -> None:
        self.zoom = max(0, min(self.zoom + by, MOST_ZOOM))
        self.refresh()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.action_zoom(1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.action_zoom(-1)

    def on_click(self, event: Click) -> None:
        """The step that had ended last there; in the chart, the one whose column it is."""
        column, line = event.x - MARGIN, event.y
        if column < 0 or not self.steps:
            return
        if line >= self.chart_line:
            self.choose(min(self.first_charted + column, len(self.steps) - 1))
            return
        at = self.scale.second(column + 1)
        self.choose(sum(step.report.ended_s <= at for step in self.steps) - 1)

    @property
    def scale(self) -> Scale:
        at = self.steps[self.place].report.ended_s if self.steps else 0.0
        return Scale.of(self.record.ended_s, self.zoom, at, max(self.size.width - MARGIN, 1))

    @property
    def lane_lines(self) -> int:
        return 2 if self.size.height < 20 else 4

    @property
    def chart_line(self) -> int:
        return 7 + self.lane_lines

    @property
    def chart_lines(self) -> int:
        return max(1, min(self.size.height - self.chart_line - 1, 10))

    @property
    def first_charted(self) -> int:
        """The chart ends with the newest step, or has the chosen one in its middle."""
        width, count = max(self.size.width - MARGIN, 1), len(self.steps)
        if self.chosen is None or count <= width:
            return max(0, count - width)
        return max(0, min(self.place - width // 2, count - width))

    def lines(self) -> list[Content]:
        record, steps, scale, place = self.record, self.steps, self.scale, self.place
        chosen = steps[place] if steps else None
        lines = [Content.styled(ABOUT, DIM), self.summary()]
        labels = scale.labels() if steps else ""
        lines.append(named("", [(character, DIM) for character in labels]))
        lines.append(named("prompt", prompt_row(record, scale)))
        bins = Bins.of(record, scale)
        rows = bins.step_rows(self.lane_lines)
        lines += [named("" if n else "tokens", row) for n, row in enumerate(rows)]
        lines += [named("drafts", bins.draft_row()), Content()]
        width, first = max(self.size.width - MARGIN, 1), self.first_charted
        typical = percentile([step.took_s for step in (record.steps or record.pieces)[-TYPICAL:]], 50)
        top = nice_top(1.6 * typical)
        charted = chart(steps[first : first + width], self.chart_lines, top, chosen)
        names = [f"{seconds(top):>{MARGIN - 1}} " if steps else "", *[""] * (self.chart_lines - 2)]
        lines += [named(name, row) for name, row in zip([*names, "each"], charted, strict=False)]
        lines += self.table(self.size.height - len(lines))
        return lines

    def summary(self) -> Content:
        record, newest = self.record, self.record.newest
        if newest is None:
            return Content.styled("Nothing was reported yet: ask something.", DIM)
        if not record.pieces:
            return Content(f"waiting, {newest.waiting} more in the queue")
        read_s = sum(piece.took_s for piece in record.pieces)
        tokens = sum(piece.report.tokens for piece in record.pieces)
        speed = rate(tokens / read_s if read_s > 0 else math.nan)
        prompt = f"prompt {newest.prompt:,}, {newest.found:,} cached, {speed}"
        steps = record.gone_steps + len(record.steps)
        return Content(f"queue {seconds(record.queue_s)}  {prompt}  {steps:,} steps, {record.output:,} tokens")

    def told(self, number: int, step: Step) -> Content:
        """One step in a line: when, for how long, and what it brought."""
        report = step.report
        ran = f"{seconds(report.began_s):>7} + {seconds(step.took_s):<7}  "
        if step.reads:
            brought = Content(f"read {report.tokens:,} tokens, {rate(report.tokens / step.took_s)}  ")
        else:
            brought = Content(f"{step.came} token{'s'[: step.came != 1]}".ljust(10))
        drafts = f"  {report.accepted} of {len(report.drafts)} drafts right" if report.drafts else ""
        others = f"  {report.running - 1} other requests" if report.running > 1 else ""
        tokens = self.record.tokens_of(step)
        texts = [spelled(token, before) for before, token in zip([None, *tokens], tokens, strict=False)]
        return Content.assemble((f"{number:>{MARGIN - 1},} {ran}", DIM), brought, *texts, (drafts + others, DIM))

    def table(self, room: int) -> list[Content]:
        """The step that is looked at, and as many around it as there is room for."""
        steps, room = self.steps, max(room, 1)
        first = max(0, min(self.place - room // 2, len(steps) - room))
        pieces, gone = len(self.record.pieces), self.record.gone_steps
        shown = enumerate(steps[first : first + room], first)
        rows = [self.told(place + 1 + gone * (place >= pieces), step) for place, step in shown]
        if len(rows) > 1:
            rows[self.place - first] = rows[self.place - first].stylize("reverse", 0, MARGIN)
        return rows


def spelled(token: Token, before: Token | None) -> Content:
    """As the view of tokens shows it: neighbours that were guessed alike have one mark together."""
    style = {Guess.RIGHT: RIGHT, Guess.WRONG: f"{WRONG} strike"}.get(token.guess, WRITES)
    mark = "" if before and before.guess is token.guess else MARKS[token.guess]
    return Content.styled(mark + signs(token.text), style)

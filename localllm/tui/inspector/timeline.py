"""The time line: queue, pieces of the prompt, every step as a tick, gaps, and where drafts were verified."""

import math
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.events import Click, MouseScrollDown, MouseScrollUp

from localllm.formatting import format_rate, format_seconds
from localllm.metrics import percentile
from localllm.tui.drawing import LineWidget, round_up_scale
from localllm.tui.inspector.lanes import (
    ACCEPTED_STYLE,
    DECODE_STYLE,
    DIM_STYLE,
    LABEL_CELLS,
    REJECTED_STYLE,
    StepColumns,
    TimeScale,
    labelled_row,
    prompt_cells,
    step_time_chart,
)
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus, StepRecord
from localllm.tui.inspector.tokens import DRAFT_MARKS, printable

HEADING = "Every step of the engine, and how long each took. ← → choose one, + - zoom."
MAX_ZOOM = 16
TYPICAL_STEPS = 512  # steps that the scale of their times is by


class Timeline(LineWidget, can_focus=True):
    BINDING_GROUP_TITLE = "Steps"
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

    def __init__(self, record: AnswerRecord):
        super().__init__(id="timeline")
        self.record = record
        self.zoom = 0
        self.selected: int | None = None  # counted from the first step of all; None: the newest

    def show(self, record: AnswerRecord) -> None:
        """Another answer, or more of the same."""
        if record is not self.record:
            self.record, self.zoom, self.selected = record, 0, None
        self.refresh()

    @property
    def steps(self) -> list[StepRecord]:
        return [*self.record.prefill_steps, *self.record.decode_steps]

    @property
    def index(self) -> int:
        """Of the step that is looked at, in `steps`; -1 where there is none."""
        last = len(self.steps) - 1
        return last if self.selected is None else max(0, min(self.selected - self.record.dropped_steps, last))

    def action_move(self, by: int) -> None:
        self.select(self.index + by)

    def select(self, place: int) -> None:
        place = max(place, 0)
        newest = place >= len(self.steps) - 1
        self.selected = None if newest else place + self.record.dropped_steps
        self.refresh()

    def action_first(self) -> None:
        self.select(0)

    def action_newest(self) -> None:
        self.select(len(self.steps))

    def action_zoom(self, by: int) -> None:
        self.zoom = max(0, min(self.zoom + by, MAX_ZOOM))
        self.refresh()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.action_zoom(1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.action_zoom(-1)

    def on_click(self, event: Click) -> None:
        """The step that had ended last there; in the chart, the one whose column it is."""
        column, line = event.x - LABEL_CELLS, event.y
        if column < 0 or not self.steps:
            return
        if line >= self.chart_line:
            self.select(min(self.first_charted + column, len(self.steps) - 1))
            return
        at = self.scale.time_at(column + 1)
        self.select(sum(step.report.ended_s <= at for step in self.steps) - 1)

    @property
    def scale(self) -> TimeScale:
        at = self.steps[self.index].report.ended_s if self.steps else 0.0
        return TimeScale.zoomed(self.record.ended_s, self.zoom, at, max(self.size.width - LABEL_CELLS, 1))

    @property
    def token_row_lines(self) -> int:
        return 2 if self.size.height < 20 else 4

    @property
    def chart_line(self) -> int:
        return 7 + self.token_row_lines

    @property
    def chart_lines(self) -> int:
        return max(1, min(self.size.height - self.chart_line - 1, 10))

    @property
    def first_charted(self) -> int:
        """The chart ends with the newest step, or has the chosen one in its middle."""
        width, count = max(self.size.width - LABEL_CELLS, 1), len(self.steps)
        if self.selected is None or count <= width:
            return max(0, count - width)
        return max(0, min(self.index - width // 2, count - width))

    def lines(self) -> list[Content]:
        record, steps, scale, place = self.record, self.steps, self.scale, self.index
        chosen = steps[place] if steps else None
        lines = [Content.styled(HEADING, DIM_STYLE), self.summary()]
        labels = scale.label_row() if steps else ""
        lines.append(labelled_row("", [(character, DIM_STYLE) for character in labels]))
        lines.append(labelled_row("prompt", prompt_cells(record, scale)))
        bins = StepColumns.from_record(record, scale)
        rows = bins.step_rows(self.token_row_lines)
        lines += [labelled_row("" if n else "tokens", row) for n, row in enumerate(rows)]
        lines += [labelled_row("drafts", bins.draft_row()), Content()]
        width, first = max(self.size.width - LABEL_CELLS, 1), self.first_charted
        typical = percentile(
            [step.took_s for step in (record.decode_steps or record.prefill_steps)[-TYPICAL_STEPS:]], 50
        )
        top = round_up_scale(1.6 * typical)
        charted = step_time_chart(steps[first : first + width], self.chart_lines, top, chosen)
        names = [f"{format_seconds(top):>{LABEL_CELLS - 1}} " if steps else "", *[""] * (self.chart_lines - 2)]
        lines += [labelled_row(name, row) for name, row in zip([*names, "each"], charted, strict=False)]
        lines += self.step_table(self.size.height - len(lines))
        return lines

    def summary(self) -> Content:
        record, newest = self.record, self.record.newest
        if newest is None:
            return Content.styled("Nothing was reported yet: ask something.", DIM_STYLE)
        if not record.prefill_steps:
            return Content(f"waiting, {newest.waiting} more in the queue")
        read_s = sum(piece.took_s for piece in record.prefill_steps)
        tokens = sum(piece.report.tokens for piece in record.prefill_steps)
        speed = format_rate(tokens / read_s if read_s > 0 else math.nan)
        prompt = f"prompt {newest.prompt:,}, {newest.found:,} cached, {speed}"
        steps = record.dropped_steps + len(record.decode_steps)
        return Content(
            f"queue {format_seconds(record.queue_s)}  {prompt}  {steps:,} steps, {record.output_count:,} tokens"
        )

    def step_line(self, number: int, step: StepRecord) -> Content:
        """One step in a line: when, for how long, and what it brought."""
        report = step.report
        ran = f"{format_seconds(report.began_s):>7} + {format_seconds(step.took_s):<7}  "
        if step.is_prefill:
            brought = Content(f"read {report.tokens:,} tokens, {format_rate(report.tokens / step.took_s)}  ")
        else:
            brought = Content(f"{step.token_count} token{'s'[: step.token_count != 1]}".ljust(10))
        drafts = f"  {report.accepted} of {len(report.drafts)} drafts right" if report.drafts else ""
        others = f"  {report.running - 1} other requests" if report.running > 1 else ""
        tokens = self.record.tokens_of(step)
        texts = [draft_styled(token, before) for before, token in zip([None, *tokens], tokens, strict=False)]
        return Content.assemble(
            (f"{number:>{LABEL_CELLS - 1},} {ran}", DIM_STYLE), brought, *texts, (drafts + others, DIM_STYLE)
        )

    def step_table(self, room: int) -> list[Content]:
        """The step that is looked at, and as many around it as there is room for."""
        steps, room = self.steps, max(room, 1)
        first = max(0, min(self.index - room // 2, len(steps) - room))
        pieces, gone = len(self.record.prefill_steps), self.record.dropped_steps
        shown = enumerate(steps[first : first + room], first)
        rows = [self.step_line(place + 1 + gone * (place >= pieces), step) for place, step in shown]
        if len(rows) > 1:
            rows[self.index - first] = rows[self.index - first].stylize("reverse", 0, LABEL_CELLS)
        return rows


def draft_styled(token: AnswerToken, before: AnswerToken | None) -> Content:
    """As the view of tokens shows it: neighbours that were guessed alike have one mark together."""
    style = {DraftStatus.ACCEPTED: ACCEPTED_STYLE, DraftStatus.REJECTED: f"{REJECTED_STYLE} strike"}.get(
        token.draft_status, DECODE_STYLE
    )
    mark = "" if before and before.draft_status is token.draft_status else DRAFT_MARKS[token.draft_status]
    return Content.styled(mark + printable(token.text), style)

"""The timeline of an answer: queue, prompt chunks, decode steps, and drafts that were accepted or rejected."""

import math
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.events import Click, MouseScrollDown, MouseScrollUp

from localllm.formatting import format_rate, format_seconds
from localllm.metrics import percentile
from localllm.tui.drawing import LineWidget, round_up_scale
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus, NewestCursor, StepRecord
from localllm.tui.inspector.timeline_rows import (
    ACCEPTED_STYLE,
    DECODE_STYLE,
    DIM_STYLE,
    LABEL_CELLS,
    NO_STEPS_TEXT,
    REJECTED_STYLE,
    StepColumns,
    TimeScale,
    labelled_row,
    prompt_cells,
    step_time_chart,
)
from localllm.tui.inspector.tokens import DRAFT_MARKS, printable

HEADING = "The engine's steps and their durations. ← → select a step, + - zoom."
MAX_ZOOM = 16
TYPICAL_STEPS = 512  # newest steps whose median duration sets the scale of the chart


class Timeline(NewestCursor, LineWidget, can_focus=True):
    BINDING_GROUP_TITLE = "Inspector: timeline"
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "Previous step", show=False),
        Binding("right", "move(1)", "Next step", show=False),
        Binding("pageup", "move(-20)", "20 steps back", show=False),
        Binding("pagedown", "move(20)", "20 steps forward", show=False),
        Binding("home", "first", "First step", show=False),
        Binding("end", "newest", "Newest step", show=False),
        Binding("plus,equals_sign", "zoom(1)", "Zoom in", show=False),
        Binding("minus", "zoom(-1)", "Zoom out", show=False),
    ]

    def __init__(self, record: AnswerRecord):
        super().__init__(id="timeline")
        self.record = record
        self.zoom = 0

    def show(self, record: AnswerRecord) -> None:
        """Show another answer, or the new steps of the same one."""
        if record is not self.record:
            self.record, self.zoom, self.selected = record, 0, None
        self.refresh()

    @property
    def steps(self) -> list[StepRecord]:
        return [*self.record.prefill_steps, *self.record.decode_steps]

    @property
    def item_counts(self) -> tuple[int, int]:
        return len(self.record.prefill_steps) + len(self.record.decode_steps), self.record.dropped_steps

    def show_selection(self) -> None:
        self.refresh()

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
        """Select the last step that had ended at this time, or in the chart, the step of this column."""
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
        """Index of the chart's first step: it ends with the newest step, or has the selected one in its middle."""
        width, count = max(self.size.width - LABEL_CELLS, 1), len(self.steps)
        if self.selected is None or count <= width:
            return max(0, count - width)
        return max(0, min(self.index - width // 2, count - width))

    def lines(self) -> list[Content]:
        record, steps, scale = self.record, self.steps, self.scale
        selected = steps[self.index] if steps else None
        lines = [Content.styled(HEADING, DIM_STYLE), self.summary()]
        labels = scale.label_row() if steps else ""
        lines.append(labelled_row("", [(character, DIM_STYLE) for character in labels]))
        lines.append(labelled_row("prompt", prompt_cells(record, scale)))
        bins = StepColumns.from_record(record, scale)
        rows = bins.step_rows(self.token_row_lines)
        lines += [labelled_row("" if i else "tokens", row) for i, row in enumerate(rows)]
        lines += [labelled_row("drafts", bins.draft_row()), Content()]
        width, first = max(self.size.width - LABEL_CELLS, 1), self.first_charted
        recent = (record.decode_steps or record.prefill_steps)[-TYPICAL_STEPS:]
        top = round_up_scale(1.6 * percentile([step.duration_s for step in recent], 50))
        chart = step_time_chart(steps[first : first + width], self.chart_lines, top, selected)
        names = [f"{format_seconds(top):>{LABEL_CELLS - 1}} " if steps else "", *[""] * (self.chart_lines - 2)]
        lines += [labelled_row(name, row) for name, row in zip([*names, "time"], chart, strict=False)]
        lines += self.step_table(self.size.height - len(lines))
        return lines

    def summary(self) -> Content:
        record, newest = self.record, self.record.newest
        if newest is None:
            return Content.styled(NO_STEPS_TEXT, DIM_STYLE)
        if not record.prefill_steps:
            return Content(f"waiting, {newest.waiting} more in the queue")
        prefill_s = sum(step.duration_s for step in record.prefill_steps)
        tokens = sum(step.report.tokens for step in record.prefill_steps)
        speed = format_rate(tokens / prefill_s if prefill_s > 0 else math.nan)
        prompt = f"prompt {newest.prompt:,}, {newest.found:,} cached, {speed}"
        steps = record.dropped_steps + len(record.decode_steps)
        return Content(
            f"queue {format_seconds(record.queue_s)}  {prompt}  {steps:,} steps, {record.output_count:,} tokens"
        )

    def step_line(self, number: int, step: StepRecord) -> Content:
        """Return a step's start, duration, tokens and drafts."""
        report = step.report
        times = f"{format_seconds(report.began_s):>7} + {format_seconds(step.duration_s):<7}  "
        if step.is_prefill:
            result = Content(f"prefill {report.tokens:,} tokens, {format_rate(report.tokens / step.duration_s)}  ")
        else:
            result = Content(f"{step.token_count} token{'s'[: step.token_count != 1]}".ljust(10))
        drafts = f"  {report.accepted} of {len(report.drafts)} drafts accepted" if report.drafts else ""
        others = f"  {report.running - 1} other requests" if report.running > 1 else ""
        tokens = self.record.tokens_of(step)
        texts = [draft_styled(token, previous) for previous, token in zip([None, *tokens], tokens, strict=False)]
        return Content.assemble(
            (f"{number:>{LABEL_CELLS - 1},} {times}", DIM_STYLE), result, *texts, (drafts + others, DIM_STYLE)
        )

    def step_table(self, height: int) -> list[Content]:
        """Return lines of the selected step and those around it."""
        steps, height = self.steps, max(height, 1)
        first = max(0, min(self.index - height // 2, len(steps) - height))
        prefill_count, dropped = len(self.record.prefill_steps), self.record.dropped_steps
        visible = enumerate(steps[first : first + height], first)
        rows = [self.step_line(i + 1 + dropped * (i >= prefill_count), step) for i, step in visible]
        if len(rows) > 1:
            rows[self.index - first] = rows[self.index - first].stylize("reverse", 0, LABEL_CELLS)
        return rows


def draft_styled(token: AnswerToken, previous: AnswerToken | None) -> Content:
    """Return a token as in the view of tokens, with one mark for adjacent tokens of the same draft status."""
    style = {DraftStatus.ACCEPTED: ACCEPTED_STYLE, DraftStatus.REJECTED: f"{REJECTED_STYLE} strike"}.get(
        token.draft_status, DECODE_STYLE
    )
    mark = "" if previous and previous.draft_status is token.draft_status else DRAFT_MARKS[token.draft_status]
    return Content.styled(mark + printable(token.text), style)

"""The timeline of an answer: queue, prompt chunks, decode steps, and drafts that were accepted or rejected.

First its rows and their cells, independent of widgets; then the view. Times are in seconds.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.events import Click, MouseScrollDown, MouseScrollUp

from localllm.formatting import format_rate, format_seconds
from localllm.metrics import percentile
from localllm.tui.drawing import LineWidget, round_up_scale, vertical_bars
from localllm.tui.inspector.record import AnswerRecord, AnswerToken, DraftStatus, NewestCursor, StepRecord
from localllm.tui.inspector.tokens import DRAFT_MARKS, printable

HEADING = "The engine's steps and their durations. ← → select a step, + - zoom."
MAX_ZOOM = 16
TYPICAL_STEPS = 512  # newest steps whose median duration sets the scale of the chart
LABEL_SPACING = 13  # minimum cells between labels
MIN_SPAN_S = 1e-3

Cell = tuple[str, str]  # a character and its style
LABEL_CELLS = 8  # for the name of a row
NO_STEPS_TEXT = "No steps yet: send a message."
DIM_STYLE = "$foreground-muted"
CHUNK_STYLES, DECODE_STYLE, ACCEPTED_STYLE, REJECTED_STYLE, SLOW_STYLE = (
    ("$secondary", "$primary"),
    "$accent",
    "$success",
    "$error",
    "$error",
)


@dataclass(frozen=True)
class TimeScale:
    """A mapping of a span of time to `width` columns."""

    start_s: float
    span_s: float
    width: int

    @classmethod
    def zoomed(cls, end_s: float, zoom: int, at_s: float, width: int) -> "TimeScale":
        """Return a scale of the time until `end_s`, halved per zoom level, centred on `at_s` if possible."""
        total_s = max(end_s, MIN_SPAN_S)
        span_s = total_s / 2**zoom
        return cls(min(max(at_s - span_s / 2, 0.0), total_s - span_s), span_s, width)

    def column(self, at_s: float) -> int:
        """Return the column of a time, which may be outside 0 to width - 1."""
        return math.floor((at_s - self.start_s) / self.span_s * self.width * (1 - 1e-9))

    def time_at(self, column: float) -> float:
        return self.start_s + self.span_s * column / self.width

    def columns_between(self, begin_s: float, end_s: float) -> range:
        """Return the visible columns that a span of time covers, at least one if any of it is visible."""
        first, last = self.column(begin_s), self.column(end_s)
        return range(max(first, 0), min(max(last, first + 1), self.width)) if last >= 0 else range(0)

    def label_row(self) -> str:
        """Return time labels, each beginning at its column."""
        step = round_up_scale(self.span_s / self.width * LABEL_SPACING)
        row = [" "] * self.width
        at = math.ceil(self.start_s / step - 1e-9) * step
        while (column := max(self.column(at + 1e-12), 0)) < self.width:
            text = "╷" + (format_seconds(at) if at else "0")
            if column + len(text) <= self.width:
                row[column : column + len(text)] = text
            at += step
        return "".join(row)


def paint_cells(cells: Iterable[Cell]) -> Content:
    """Return cells as content with one span per run of the same style."""
    runs = groupby(cells, key=lambda cell: cell[1])
    return Content.assemble(*(Content.styled("".join(text for text, _ in run), style) for style, run in runs))


def labelled_row(name: str, cells: Iterable[Cell]) -> Content:
    return Content.assemble(Content.styled(name.ljust(LABEL_CELLS), DIM_STYLE), paint_cells(cells))


def prompt_cells(record: AnswerRecord, scale: TimeScale) -> list[Cell]:
    """Return the time in the queue, then the chunks of the prompt, with their number of tokens if it fits."""
    row: list[Cell] = [(" ", "")] * scale.width
    queue_s = record.queue_s if record.prefill_steps else record.ended_s
    for column in scale.columns_between(0.0, queue_s) if queue_s else ():
        row[column] = ("░", DIM_STYLE)
    for i, step in enumerate(record.prefill_steps):
        columns = scale.columns_between(step.report.began_s, step.report.ended_s)
        count = f"{step.report.tokens:,}"
        text = count.center(len(columns)) if len(columns) >= len(count) + 2 else " " * len(columns)
        for column, character in zip(columns, text, strict=True):
            style = CHUNK_STYLES[i % 2]
            is_digit = character != " "
            row[column] = (character, f"$foreground on {style}") if is_digit else ("█▓"[i % 2], style)
    return row


@dataclass(frozen=True)
class StepColumns:
    """Tokens, draft tokens and accepted ones of the steps that ended in each column."""

    tokens: list[int]
    drafted: list[int]
    accepted: list[int]

    @classmethod
    def from_record(cls, record: AnswerRecord, scale: TimeScale) -> "StepColumns":
        tokens, drafted, accepted = ([0] * scale.width for _ in range(3))
        for step in [*visible_steps(record.prefill_steps[-1:], scale), *visible_steps(record.decode_steps, scale)]:
            report = step.report
            column = scale.column(report.ended_s)
            tokens[column] += step.token_count
            if report.drafts:
                drafted[column] += len(report.drafts)
                accepted[column] += report.accepted
        return cls(tokens, drafted, accepted)

    def step_rows(self, height: int) -> list[list[Cell]]:
        """Return a vertical bar of the tokens in each column, coloured by their drafts."""
        rows = vertical_bars(self.tokens, height, max(self.tokens, default=0) or 1)
        counts = zip(self.drafted, self.accepted, strict=True)
        styles = [
            ACCEPTED_STYLE if accepted else REJECTED_STYLE if drafted else DECODE_STYLE
            for drafted, accepted in counts
        ]
        return [list(zip(row, styles, strict=True)) for row in rows]

    def draft_row(self) -> list[Cell]:
        """Return ✓ for columns whose drafts were all accepted, ✗ for all rejected, ± for some of both."""
        return [draft_cell(*counts) for counts in zip(self.drafted, self.accepted, strict=True)]


def visible_steps(steps: Sequence[StepRecord], scale: TimeScale) -> Sequence[StepRecord]:
    """Return the steps that ended within the scale."""
    first = bisect_left(steps, scale.start_s, key=lambda step: step.report.ended_s)
    last = bisect_right(steps, scale.start_s + scale.span_s, key=lambda step: step.report.ended_s)
    return steps[first:last]


def draft_cell(drafted: int, accepted: int) -> Cell:
    if not drafted:
        return " ", ""
    return (
        ("✓", ACCEPTED_STYLE)
        if accepted == drafted
        else ("±", ACCEPTED_STYLE)
        if accepted
        else ("✗", REJECTED_STYLE)
    )


def step_time_chart(
    steps: Sequence[StepRecord], height: int, top: float, selected: StepRecord | None
) -> list[list[Cell]]:
    """Return a vertical bar of the duration of each step."""
    rows = vertical_bars([step.duration_s for step in steps], height, top)
    styles = [step_style(step, top) + (" reverse" if step is selected else "") for step in steps]
    return [list(zip(row, styles, strict=True)) for row in rows]


def step_style(step: StepRecord, top: float) -> str:
    if step.is_prefill:
        return CHUNK_STYLES[0]
    return SLOW_STYLE if step.duration_s > top else ACCEPTED_STYLE if step.report.drafts else DECODE_STYLE


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

"""The rows of the timeline and their cells: time labels, queue and prompt, tokens, drafts, step durations.

Times are in seconds. Independent of widgets.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content

from localllm.formatting import format_seconds
from localllm.tui.drawing import round_up_scale, vertical_bars
from localllm.tui.inspector.record import AnswerRecord, StepRecord

LABEL_SPACING = 13  # minimum cells between labels
MIN_SPAN_S = 1e-3


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

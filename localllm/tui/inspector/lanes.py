"""The time line of an answer as rows of cells: its place in the queue and its prompt, its steps, its drafts."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content

from localllm.formatting import format_seconds
from localllm.tui.drawing import round_up_scale, vertical_bars
from localllm.tui.inspector.record import AnswerRecord, StepRecord

# A stretch of time as columns of a screen. Pure arithmetic.

LABEL_SPACING = 13  # at least from one label to the next
MIN_SPAN_S = 1e-3


@dataclass(frozen=True)
class TimeScale:
    """`width` columns for the seconds from `start_s` on."""

    start_s: float
    span_s: float
    width: int

    @classmethod
    def zoomed(cls, end_s: float, zoom: int, at_s: float, width: int) -> "TimeScale":
        """Half as much of the time until end_s with each zoom, with at_s in it, in the middle where it can be."""
        whole = max(end_s, MIN_SPAN_S)
        span = whole / 2**zoom
        return cls(min(max(at_s - span / 2, 0.0), whole - span), span, width)

    def column(self, at_s: float) -> int:
        """Which may lie outside of 0 to width - 1."""
        return math.floor((at_s - self.start_s) / self.span_s * self.width * (1 - 1e-9))

    def time_at(self, column: float) -> float:
        return self.start_s + self.span_s * column / self.width

    def columns_between(self, begin_s: float, end_s: float) -> range:
        """Those that a stretch of time covers, at least one if any of it is to be seen."""
        first, last = self.column(begin_s), self.column(end_s)
        return range(max(first, 0), min(max(last, first + 1), self.width)) if last >= 0 else range(0)

    def label_row(self) -> str:
        """Times above their columns, each beginning at its own."""
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
LABEL_CELLS = 8  # columns for the name of a row
DIM_STYLE = "$foreground-muted"
CHUNK_STYLES, DECODE_STYLE, ACCEPTED_STYLE, REJECTED_STYLE, SLOW_STYLE = (
    ("$secondary", "$primary"),
    "$accent",
    "$success",
    "$error",
    "$error",
)


def paint_cells(cells: Iterable[Cell]) -> Content:
    """Neighbours of one style together."""
    runs = groupby(cells, key=lambda cell: cell[1])
    return Content.assemble(*(Content.styled("".join(text for text, _ in run), style) for style, run in runs))


def labelled_row(name: str, cells: Iterable[Cell]) -> Content:
    return Content.assemble(Content.styled(name.ljust(LABEL_CELLS), DIM_STYLE), paint_cells(cells))


def prompt_cells(record: AnswerRecord, scale: TimeScale) -> list[Cell]:
    """The time in the queue, then each piece of the prompt with how many tokens it had, where there is room."""
    row: list[Cell] = [(" ", "")] * scale.width
    begun = record.queue_s if record.prefill_steps else record.ended_s
    for column in scale.columns_between(0.0, begun) if begun else ():
        row[column] = ("░", DIM_STYLE)
    for place, piece in enumerate(record.prefill_steps):
        covered = scale.columns_between(piece.report.began_s, piece.report.ended_s)
        told = f"{piece.report.tokens:,}"
        text = told.center(len(covered)) if len(covered) >= len(told) + 2 else " " * len(covered)
        for column, character in zip(covered, text, strict=True):
            shade = CHUNK_STYLES[place % 2]
            is_number = character != " "
            row[column] = (character, f"$foreground on {shade}") if is_number else ("█▓"[place % 2], shade)
    return row


@dataclass(frozen=True)
class StepColumns:
    """What the steps that ended in each column of time brought."""

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
        """A tick a step where steps lie apart, else as high as there were tokens."""
        rows = vertical_bars(self.tokens, height, max(self.tokens, default=0) or 1)
        counts = zip(self.drafted, self.accepted, strict=True)
        styles = [
            ACCEPTED_STYLE if accepted else REJECTED_STYLE if drafted else DECODE_STYLE
            for drafted, accepted in counts
        ]
        return [list(zip(row, styles, strict=True)) for row in rows]

    def draft_row(self) -> list[Cell]:
        """✓ where all drafts of a column were right, ✗ where none was, else ± ."""
        return [draft_cell(*counts) for counts in zip(self.drafted, self.accepted, strict=True)]


def visible_steps(steps: Sequence[StepRecord], scale: TimeScale) -> Sequence[StepRecord]:
    """Those that may be seen."""
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
    """How long each step took, a column each."""
    rows = vertical_bars([step.took_s for step in steps], height, top)
    styles = [step_style(step, top) + (" reverse" if step is selected else "") for step in steps]
    return [list(zip(row, styles, strict=True)) for row in rows]


def step_style(step: StepRecord, top: float) -> str:
    if step.is_prefill:
        return CHUNK_STYLES[0]
    return SLOW_STYLE if step.took_s > top else ACCEPTED_STYLE if step.report.drafts else DECODE_STYLE

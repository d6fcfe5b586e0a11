"""The time line of an answer as rows of cells: its place in the queue and its prompt, its steps, its drafts."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content

from localllm.tui.inspector.record import Record, Step
from localllm.tui.inspector.scale import Scale
from localllm.tui.sparkline import columns

Cell = tuple[str, str]  # a character and its style
MARGIN = 8  # columns for the name of a row
DIM = "$foreground-muted"
PIECES, WRITES, RIGHT, WRONG, LONG = ("$secondary", "$primary"), "$accent", "$success", "$error", "$error"


def painted(cells: Iterable[Cell]) -> Content:
    """Neighbours of one style together."""
    runs = groupby(cells, key=lambda cell: cell[1])
    return Content.assemble(*(Content.styled("".join(text for text, _ in run), style) for style, run in runs))


def named(name: str, cells: Iterable[Cell]) -> Content:
    return Content.assemble(Content.styled(name.ljust(MARGIN), DIM), painted(cells))


def prompt_row(record: Record, scale: Scale) -> list[Cell]:
    """The time in the queue, then each piece of the prompt with how many tokens it had, where there is room."""
    row: list[Cell] = [(" ", "")] * scale.width
    begun = record.queue_s if record.pieces else record.ended_s
    for column in scale.columns(0.0, begun) if begun else ():
        row[column] = ("░", DIM)
    for place, piece in enumerate(record.pieces):
        covered = scale.columns(piece.report.began_s, piece.report.ended_s)
        told = f"{piece.report.tokens:,}"
        text = told.center(len(covered)) if len(covered) >= len(told) + 2 else " " * len(covered)
        for column, character in zip(covered, text, strict=True):
            shade = PIECES[place % 2]
            is_number = character != " "
            row[column] = (character, f"$foreground on {shade}") if is_number else ("█▓"[place % 2], shade)
    return row


@dataclass(frozen=True)
class Bins:
    """What the steps that ended in each column of time brought."""

    tokens: list[int]
    drafted: list[int]
    accepted: list[int]

    @classmethod
    def of(cls, record: Record, scale: Scale) -> "Bins":
        tokens, drafted, accepted = ([0] * scale.width for _ in range(3))
        for step in [*within(record.pieces[-1:], scale), *within(record.steps, scale)]:
            report = step.report
            column = scale.column(report.ended_s)
            tokens[column] += step.came
            if report.drafts:
                drafted[column] += len(report.drafts)
                accepted[column] += report.accepted
        return cls(tokens, drafted, accepted)

    def step_rows(self, height: int) -> list[list[Cell]]:
        """A tick a step where steps lie apart, else as high as there were tokens."""
        rows = columns(self.tokens, height, max(self.tokens, default=0) or 1)
        counts = zip(self.drafted, self.accepted, strict=True)
        styles = [RIGHT if accepted else WRONG if drafted else WRITES for drafted, accepted in counts]
        return [list(zip(row, styles, strict=True)) for row in rows]

    def draft_row(self) -> list[Cell]:
        """✓ where all drafts of a column were right, ✗ where none was, else ± ."""
        return [verdict(*counts) for counts in zip(self.drafted, self.accepted, strict=True)]


def within(steps: Sequence[Step], scale: Scale) -> Sequence[Step]:
    """Those that may be seen."""
    first = bisect_left(steps, scale.start_s, key=lambda step: step.report.ended_s)
    last = bisect_right(steps, scale.start_s + scale.span_s, key=lambda step: step.report.ended_s)
    return steps[first:last]


def verdict(drafted: int, accepted: int) -> Cell:
    if not drafted:
        return " ", ""
    return ("✓", RIGHT) if accepted == drafted else ("±", RIGHT) if accepted else ("✗", WRONG)


def chart(steps: Sequence[Step], height: int, top: float, chosen: Step | None) -> list[list[Cell]]:
    """How long each step took, a column each."""
    rows = columns([step.took_s for step in steps], height, top)
    styles = [colour(step, top) + (" reverse" if step is chosen else "") for step in steps]
    return [list(zip(row, styles, strict=True)) for row in rows]


def colour(step: Step, top: float) -> str:
    if step.reads:
        return PIECES[0]
    return LONG if step.took_s > top else RIGHT if step.report.drafts else WRITES

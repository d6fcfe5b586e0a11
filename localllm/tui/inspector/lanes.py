"""The time line of an answer as rows of cells: its place in the queue and its prompt, its steps, its drafts."""

from collections.abc import Iterable, Sequence
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
    for column in scale.columns(0.0, begun):
        row[column] = ("░", DIM)
    for place, piece in enumerate(record.pieces):
        covered = scale.columns(piece.report.began_s, piece.report.ended_s)
        told = f"{piece.report.tokens:,}"
        text = told.center(len(covered)) if len(covered) >= len(told) + 2 else " " * len(covered)
        for column, character in zip(covered, text, strict=True):
            shade = character if character != " " else "█▓"[place % 2]
            style = PIECES[place % 2] + (" reverse bold" if character != " " else "")
            row[column] = (shade, style)
    return row


def step_rows(record: Record, scale: Scale, height: int) -> list[list[Cell]]:
    """Tokens in each column of time: a tick a step where steps lie apart, else how many there were."""
    tokens, styles = [0] * scale.width, [""] * scale.width
    for step in [*record.pieces[-1:], *record.steps]:
        column = scale.column(step.report.ended_s)
        if 0 <= column < scale.width:
            tokens[column] += step.came
            drafted = step.report.drafts
            styles[column] = RIGHT if step.report.accepted else styles[column] or (WRONG if drafted else WRITES)
    rows = columns(tokens, height, max(tokens, default=0) or 1)
    return [list(zip(row, styles, strict=True)) for row in rows]


def draft_row(record: Record, scale: Scale) -> list[Cell]:
    """✓ where all drafts of a column were right, ✗ where none was, else ± ."""
    drafted, accepted = [0] * scale.width, [0] * scale.width
    for step in record.steps:
        column = scale.column(step.report.ended_s)
        if step.report.drafts and 0 <= column < scale.width:
            drafted[column] += len(step.report.drafts)
            accepted[column] += step.report.accepted
    return [verdict(*counts) for counts in zip(drafted, accepted, strict=True)]


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

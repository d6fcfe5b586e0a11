"""Texts in columns, the same in a terminal and in a pipe."""

from collections.abc import Sequence


def format_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    return format_table([(f"{name} ", value) for name, value in rows])


def format_table(rows: Sequence[Sequence[str]], alignments: str = "") -> str:
    """Columns as wide as their widest cell; alignments: where the cells of each stand, `<` or `>`, else to the
    left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = [f"{side}{width}" for side, width in zip(alignments.ljust(len(widths), "<"), widths, strict=True)]
    padded = ("  ".join(f"{cell:{place}}" for cell, place in zip(row, places, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)

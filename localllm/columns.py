"""Texts in columns, the same in a terminal and in a pipe."""

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    return table([(f"{name} ", value) for name, value in rows])


def table(rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Columns as wide as their widest cell; sides: where the cells of each stand, `<` or `>`, else to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), "<"), widths, strict=True)]
    padded = ("  ".join(f"{cell:{place}}" for cell, place in zip(row, places, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)

"""Texts in columns, the same in a terminal and in a pipe."""

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    return table([(f"{name} ", value) for name, value in rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)

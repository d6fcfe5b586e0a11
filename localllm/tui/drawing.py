"""Text of a given width in terminal cells, bars of block characters, and widgets drawn line by line.

East Asian characters and emoji take two cells.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from localllm.formatting import one_line


def truncate(text: str, width: int) -> str:
    """Return the text in one line of at most `width` cells, with an ellipsis if it is cut."""
    text = one_line(text)
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def align_left(text: str, width: int) -> str:
    """Return the text in exactly `width` cells, padded on the right."""
    return set_cell_size(truncate(text, width), width)


def align_right(text: str, width: int) -> str:
    """Return the text in exactly `width` cells, padded on the left."""
    text = truncate(text, width)
    return " " * (width - cell_len(text)) + text


VERTICAL_EIGHTHS = " ▁▂▃▄▅▆▇█"
HORIZONTAL_EIGHTHS = " ▏▎▍▌▋▊▉█"
ROUND_STEPS = (1, 1.5, 2, 3, 5, 7, 10)


def bar(fraction: float, width: int, empty: str = " ") -> str:
    """Return a horizontal bar over `fraction` (0 to 1) of `width` cells, visible for any fraction above 0.

    empty: character of the other cells
    """
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    eighths = max(eighths, int(fraction > 0))
    full_cells, remainder = divmod(eighths, 8)
    filled = "█" * full_cells + (HORIZONTAL_EIGHTHS[remainder] if remainder else "")
    return filled + empty * (width - len(filled))


def bar_levels(values: Sequence[float], top: float, height: int = 1) -> list[int]:
    """Return the height of each value in eighths of a cell, at least 1 above 0; `top` and above fill `height`
    cells.
    """
    return [max(int(value > 0), round(min(value / top, 1.0) * 8 * height)) if top > 0 else 0 for value in values]


def round_up_scale(value: float) -> float:
    """Return the next round number, for a scale that is stable while values fluctuate."""
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in ROUND_STEPS if power * step >= value * 0.999)


def sparkline(
    values: Sequence[float], width: int, *, top: float, style: str = "", above_style: str = ""
) -> Content:
    """Return one cell per value, the newest on the right. above_style: style of values above `top`"""
    shown = values[-width:] if width > 0 else ()
    ticks = [
        Content.styled(VERTICAL_EIGHTHS[level], above_style if value > top else style)
        for value, level in zip(shown, bar_levels(shown, top), strict=True)
    ]
    return Content.assemble(" " * (width - len(ticks)), *ticks)


def vertical_bars(values: Sequence[float], height: int, top: float) -> list[str]:
    """Return vertical bars, one column per value, as `height` lines from top to bottom."""
    levels = bar_levels(values, top, height)
    return [
        "".join(VERTICAL_EIGHTHS[min(max(level - 8 * line, 0), 8)] for level in levels)
        for line in reversed(range(height))
    ]


class LineWidget(Widget):
    """Renders each line separately, which for many styles per line is several times as fast as one Content."""

    DEFAULT_CSS = "LineWidget { width: 1fr; height: 1fr; text-wrap: nowrap; text-overflow: clip; }"

    @abstractmethod
    def lines(self) -> list[Content]:
        """Return the current lines; they are cropped to the widget's size."""

    def render_lines(self, crop: Region) -> list[Strip]:
        width, height = self.size
        style = self.visual_style
        self.strips = [
            Visual.to_strips(self, line, width, 1, style)[0] if line else Strip.blank(width, style.rich_style)
            for line in self.lines()[:height]
        ]
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        if y >= len(self.strips):
            return Strip.blank(self.size.width, self.visual_style.rich_style)
        return self.strips[y]

"""Text of one line in so many cells of the screen: East Asian letters and emoji take two."""

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
    """At most `width` cells; what was left out is an ellipsis at the end."""
    text = one_line(text)
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 0 else ""


def align_left(text: str, width: int) -> str:
    """Exactly `width` cells, with blanks behind."""
    return set_cell_size(truncate(text, width), width)


def align_right(text: str, width: int) -> str:
    """Exactly `width` cells, with blanks before."""
    text = truncate(text, width)
    return " " * (width - cell_len(text)) + text


# Bars of block characters in eighths of a cell, lying and standing; they are read without colour as well.

VERTICAL_EIGHTHS = " ▁▂▃▄▅▆▇█"
HORIZONTAL_EIGHTHS = " ▏▎▍▌▋▊▉█"
ROUND_STEPS = (1, 1.5, 2, 3, 5, 7, 10)


def bar(share: float, width: int, empty: str = " ") -> str:
    """A lying bar over `share` (0 to 1) of `width` cells; empty: what stands in the others. What is more than
    nothing is seen."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    eighths = max(eighths, int(share > 0))
    whole, part = divmod(eighths, 8)
    drawn = "█" * whole + (HORIZONTAL_EIGHTHS[part] if part else "")
    return drawn + empty * (width - len(drawn))


def bar_levels(values: Sequence[float], top: float) -> list[int]:
    """How many eighths each value is high; what is more than nothing is seen, what is above `top` is cut."""
    return [max(int(value > 0), round(min(value / top, 1.0) * 8)) if top > 0 else 0 for value in values]


def round_up_scale(value: float) -> float:
    """The next round number from `value`: a scale that stays as it is while values waver."""
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in ROUND_STEPS if power * step >= value * 0.999)


def sparkline(
    values: Sequence[float], width: int, *, top: float, style: str = "", above_style: str = ""
) -> Content:
    """The newest values, a cell each, the newest at the right; above_style: the style of those that are cut."""
    shown = values[-width:] if width > 0 else ()
    ticks = [
        Content.styled(VERTICAL_EIGHTHS[level], above_style if value > top else style)
        for value, level in zip(shown, bar_levels(shown, top), strict=True)
    ]
    return Content.assemble(" " * (width - len(ticks)), *ticks)


def vertical_bars(values: Sequence[float], height: int, top: float) -> list[str]:
    """Standing bars over several lines, the uppermost first; each line has a cell for each value."""
    eighths = [max(int(value > 0), round(min(value / top, 1.0) * 8 * height)) for value in values]
    return [
        "".join(VERTICAL_EIGHTHS[min(max(eighth - 8 * line, 0), 8)] for eighth in eighths)
        for line in reversed(range(height))
    ]


# A part of the screen that is drawn line by line.


class LineWidget(Widget):
    """Every line by itself: together, lines of many colours take several times as long."""

    DEFAULT_CSS = "LineWidget { width: 1fr; height: 1fr; text-wrap: nowrap; text-overflow: clip; }"

    @abstractmethod
    def lines(self) -> list[Content]:
        """As of now; those that are wider than the widget are cut, as are those that it has no room for."""

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

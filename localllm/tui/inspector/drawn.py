"""A part of the screen that is drawn line by line."""

from abc import abstractmethod

from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget


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

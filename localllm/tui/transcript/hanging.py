"""Text whose first line has something before it that its other lines are indented by."""

from rich.segment import Segment
from textual.content import Content
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual


class HangingIndent(Visual):
    def __init__(self, content: Content, first: str, rest: str):
        self.content, self.first, self.rest = content, first, rest

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return self.content.get_optimal_width(rules, container_width) + len(self.rest)

    def get_height(self, rules: RulesMap, width: int) -> int:
        return self.content.get_height(rules, self.text_width(width))

    def text_width(self, width: int) -> int:
        return max(1, width - len(self.rest))

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        strips = self.content.render_strips(self.text_width(width), height, style, options)
        before = [Segment(text, style.rich_style) for text in (self.first, self.rest)]
        return [Strip([before[y > 0], *strip]) for y, strip in enumerate(strips)]

"""Renders terminal screens as the pictures in docs/images. `make screens` updates them: it plays a session in tmux
(`tests/tui/test_session_in_tmux.py`) and renders its screens.

Answers are reproducible, but times are not, so pictures are updated only on demand, and no test compares them.
"""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "docs" / "images"
BACKGROUND, FOREGROUND = (18, 22, 27), (223, 229, 234)
THEME = TerminalTheme(BACKGROUND, FOREGROUND, [(0, 0, 0)] + [FOREGROUND] * 7)  # the app sets all other colours
# Rich's format without the fonts that it downloads: a picture must not send requests.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, ui-monospace, monospace;
}}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def render_svg(screen: str, columns: int, title: str) -> str:
    """Render lines with ANSI colours, as `tmux capture-pane -e -p` prints them, as SVG."""
    console = Console(record=True, width=columns, file=StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text.from_ansi(screen), soft_wrap=True, end="")
    return console.export_svg(title=title, theme=THEME, code_format=FORMAT, unique_id="screen")

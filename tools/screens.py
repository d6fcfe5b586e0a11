"""Screens of a terminal as pictures in docs/images. `make screens` takes them anew: a person's session in tmux
(`tests/tui/test_session_in_tmux.py`) is played, and what stood on the screen is drawn here.

The answers are the same each time and the times are not, so pictures are taken on order and not held to a pixel.
"""

from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

FOLDER = Path(__file__).parents[1] / "docs" / "images"
BACKGROUND, FOREGROUND = (18, 22, 27), (223, 229, 234)
THEME = TerminalTheme(BACKGROUND, FOREGROUND, [(0, 0, 0)] + [FOREGROUND] * 7)  # the app names all other colours
# As Rich's own, without the fonts that it fetches: a picture asks no other address.
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


def picture(screen: str, columns: int, title: str) -> str:
    """An SVG of lines with their escapes of colour, as `tmux capture-pane -e -p` prints them."""
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, color_system="truecolor", force_terminal=True)
        console.print(Text.from_ansi(screen), soft_wrap=True, end="")
        return console.export_svg(title=title, theme=THEME, code_format=FORMAT, unique_id="screen")

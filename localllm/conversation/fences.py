"""Text between Markdown fences."""

import re

BACKTICKS = re.compile(r"`{3,}")


def fence_text(text: str, language: str = "") -> str:
    """Return the text as a code block, with a fence longer than any inside it."""
    longest = max((len(run) for run in BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{fence}"

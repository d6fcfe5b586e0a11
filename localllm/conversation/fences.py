"""A text between fences, as Markdown has them."""

import re

TICKS = re.compile(r"`{3,}")


def fenced(text: str, language: str = "") -> str:
    """The text as a block of code, whose fence is longer than any inside it."""
    longest = max((len(found) for found in TICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{fence}"

"""A text between fences, as Markdown has them."""

import re

BACKTICKS = re.compile(r"`{3,}")


def fence_text(text: str, language: str = "") -> str:
    """The text as a block of code, whose fence is longer than any inside it."""
    longest = max((len(found) for found in BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{fence}"

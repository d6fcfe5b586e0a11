"""What was meant by a name that nobody knows. Knows no names itself."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The remedy: the name that is spelt alike, or none."""
    near = difflib.get_close_matches(name[:80], choices, n=1)
    return f"did you mean {near[0]}?" if near else "leave it out"

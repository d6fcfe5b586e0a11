"""Expands sentence patterns with `{one|another}` alternatives and `<slot>` references."""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<([A-Za-z_]+)>")


def expand(rng: random.Random, pattern: str, slots: Mapping[str, str] | None = None) -> str:
    """Resolve alternatives, which may be nested, then fill slots."""
    while _CHOICE.search(pattern):
        pattern = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), pattern)
    if slots is not None:
        pattern = _SLOT.sub(lambda m: slots[m.group(1)], pattern)
    return re.sub(r"  +", " ", pattern).strip()


def article(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def words(text: str, separator: str | None = None) -> list[str]:
    """Split a long list, which is easier to write as one string."""
    return text.split(separator)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def join_and(items: Sequence[str]) -> str:
    """Join items as `milk, eggs and bread`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def invented_word(rng: random.Random, syllables: int = 2) -> str:
    """Random word, from which the model learns to copy instead of recalling."""
    onsets = words("b d f g k l m n p r s t v z br gl sn tr w")
    codas = ("", "", "l", "n", "r", "m", "x", "sk")
    return "".join(rng.choice(onsets) + rng.choice("aeiou") + rng.choice(codas) for _ in range(syllables))

"""Prompts of a given length that no cache knows: random words, or pieces of a text from random places.

Lengths are in words; how many tokens a word makes is the server's to tell.
"""

import random
from collections.abc import Iterator, Sequence

COMMON = (
    "a able about after again all also and any back ball be because bed bird big blue boat book boy bread bring "
    "cat come day do dog door down each eat eye fall family far fast feel find fish five flower fly food friend "
    "from full game garden get girl give go good green hand happy have he help her here hill him home house how "
    "in it jump know lake land last laugh leaf learn leave let light like little long look lost love make man "
    "many moon more morning mother mountain much name new night no not now of old on one open other our over "
    "paper park people place play rain read red river road run sad say school sea see she shoe sing sit sky "
    "sleep small snow song star stay stone story sun swim table take talk tell thank the then they thing think "
    "three time to today together tree two under up walk want warm water we well what when where white who wind "
    "window with word work world year yellow you"
)
WORDS: Sequence[str] = COMMON.split()
UNIQUE_PREFIX_WORDS = 4  # words at the front that tell one prompt from another


def generate_prompts(seed: int, words: int, text: Sequence[str] | None = None) -> Iterator[str]:
    """Endless prompts of so many words, the same for the same seed. text: words to take pieces of, instead of
    random ones; each begins with a few random words, so that no two that overlap share their beginning."""
    draw = random.Random(seed)
    while True:
        chosen: list[str] = draw.choices(WORDS, k=words)
        if text:
            start = draw.randrange(len(text))
            piece = [text[(start + place) % len(text)] for place in range(words)]
            chosen[UNIQUE_PREFIX_WORDS:] = piece[UNIQUE_PREFIX_WORDS:]
        yield " ".join(chosen)

"""A random model that follows a grammar and prefers closing tokens."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from localllm.text.grammar.follow import GrammarFollower

Bits = NDArray[np.bool_]

CLOSERS = (b'"', b"}", b"]", b":", b".", b"@", b"-")
CHANCE = 0.6  # of one of them, where it may come


def allowed_now(follower: GrammarFollower) -> Bits:
    return bits(follower.begin([])()[0])


def bits(mask: NDArray[np.int32] | None) -> Bits:
    assert mask is not None
    return np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)


def walk(
    follower: GrammarFollower,
    tokens: list[bytes],
    ends: set[int],
    seed: int,
    most: int = 400,
    leak: bool = False,
    closers: Collection[bytes] = CLOSERS,
) -> tuple[bytes, bool]:
    """Return the generated text, and whether it ended. `leak`: one token that the grammar forbids is accepted."""
    random = np.random.default_rng(seed)
    closing = np.array([token.strip() in closers for token in tokens])
    end = np.isin(np.arange(len(tokens)), list(ends))
    leak_at = random.integers(0, 6) if leak else -1
    said: list[bytes] = []
    while not follower.finished:
        if len(said) == most:
            return b"".join(said), False
        allowed = allowed_now(follower)[: len(tokens)]
        assert allowed.any(), follower.fault
        if len(said) == leak_at:
            wrong = [i for i, token in enumerate(tokens) if token and not allowed[i] and not end[i]]
            said.append(tokens[random.choice(wrong)])
            continue
        if (allowed & end).any() and random.random() < CHANCE:
            break
        preferred = allowed & closing if random.random() < CHANCE else allowed
        token = int(random.choice(np.flatnonzero(preferred if preferred.any() else allowed)))
        if end[token]:
            break
        follower.advance(token)
        said.append(tokens[token])
    return b"".join(said), True

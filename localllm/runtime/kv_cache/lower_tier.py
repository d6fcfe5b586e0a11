"""The interface between a block pool and a tier below it, which stores blocks that leave the pool, and returns
them. Pure Python, like `blocks.py`; `disk_tier.py` implements it.
"""

from collections.abc import Sequence as ListLike
from typing import NamedTuple, Protocol

from localllm.metrics import DiskStats


class CachedPrefix(NamedTuple):
    """The tokens that a cached block ends, whose serial it is stored under."""

    key: tuple[int, ...]  # of the block
    token_ids: ListLike[int]  # of the sequence that computed it, which only grows
    length: int  # tokens up to the end of the block
    scope: str


class PrefixLoad(Protocol):
    """Blocks that are being loaded from a lower tier into the prefix cache."""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens loaded so far."""
        ...


class NothingToLoad(NamedTuple):
    done: bool = True
    tokens: int = 0


NOTHING_TO_LOAD = NothingToLoad()


class LowerTier(Protocol):
    """A tier below the block pool, which receives its cached blocks and returns them to it."""

    counts: DiskStats

    def before_drop(self, serial: int) -> None:
        """A cached block is about to be overwritten."""
        ...

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        """Begin to load what follows the cached prefix of these tokens, unless computing it is faster."""
        ...

    def install_loaded(self, *, wait_s: float = 0.0) -> bool:
        """Copy what has been read into the prefix cache, and return whether that took time. wait_s: how long to
        wait for something, if any sequence does"""
        ...

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record how long computing the tokens of a prompt took."""
        ...

    def keep(self, serial: int) -> None:
        """Store the cached prefix that a block ends."""
        ...

    def close(self) -> None:
        """Store what is worth it before the caches are freed."""
        ...

"""The interface between a block pool and what is below it: a tier that stores blocks which leave the pool and
returns them (`disk_tier.py`), or processes that compute prompts for it (`disaggregation/prefill_tier.py`). Pure
Python, like `blocks.py`.
"""

from collections.abc import Sequence as ListLike
from typing import NamedTuple, Protocol

from localllm.metrics import DiskStats, TierMove


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
        """Tokens read from a disk so far."""
        ...

    @property
    def computed(self) -> int:
        """Tokens that another process computed for this load."""
        ...

    @property
    def began(self) -> float:
        """When that began, in seconds of `perf_counter`."""
        ...


class NothingToLoad(NamedTuple):
    done: bool = True
    tokens: int = 0
    computed: int = 0
    began: float = 0.0


NOTHING_TO_LOAD = NothingToLoad()


class LowerTier(Protocol):
    """A tier below the block pool, which receives its cached blocks and returns them to it."""

    max_loads: int  # sequences of the queue whose prefixes are loaded at once
    writes_evicted: bool  # whether it stores blocks that leave the pool

    @property
    def counts(self) -> DiskStats | None:
        """Counters of the disk; None without a disk."""
        ...

    @property
    def moves(self) -> dict[str, TierMove]:
        """Copies to and from this tier, by names such as `disk_to_host`."""
        ...

    def before_drop(self, serial: int) -> None:
        """A cached block is about to be overwritten."""
        ...

    def begin_load(self, token_ids: ListLike[int], scope: str) -> PrefixLoad:
        """Begin to load what follows the cached prefix of these tokens, unless computing it is faster."""
        ...

    def cancel_load(self, load: PrefixLoad) -> None:
        """The sequence of a load has ended."""
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

"""The keys and values of a prefix as bytes, for a file or another process, and back: snapshots of at most 256
tokens (`kv_cache/snapshot.py`), one after the other. At most one of them is in memory besides the caches.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace

from typing_extensions import Buffer

from localllm.errors import Busy, ContextOverflow, UsageError
from localllm.llm.llm import LLM
from localllm.runtime.kv_cache.prefix_copy import (
    SEGMENT_BLOCKS,
    PrefixExport,
    all_types,
    copy_in,
    with_frequencies,
)
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks
from localllm.runtime.kv_cache.snapshot import (
    MAX_HEADER_BYTES,
    DamagedSnapshot,
    KVSnapshot,
    SnapshotSplitter,
)


class StateExport(Iterator[list[Buffer]]):
    """The snapshots of the longest cached prefix of some tokens, each as chunks of bytes."""

    def __init__(self, llm: LLM, token_ids: ListLike[int], scope: str, owner: str):
        """scope: in which the tokens are cached; owner: recorded in the snapshots, as their scope"""
        engine = llm.worker.engine
        identity = replace(llm.cache_identity, scope=owner)

        def begin() -> PrefixExport:
            own = with_frequencies(identity, engine.runner)
            return PrefixExport(engine.runner, engine.pool, own, token_ids, scope)

        self.llm = llm
        self.prefix = llm.worker.call(begin)
        self.tokens = self.nbytes = 0  # of the snapshots so far

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return self.prefix.length

    def __next__(self) -> list[Buffer]:
        copied = self.llm.worker.call(lambda: next(self.prefix, None))
        if copied is None:
            raise StopIteration
        tokens, blocks = copied
        snapshot = blocks.snapshot(tokens)
        self.tokens, self.nbytes = tokens.end, self.nbytes + snapshot.nbytes
        return list(snapshot.chunks())


class StateImport:
    """Copies snapshots into the caches as their bytes arrive, so that prompts that begin with their tokens find
    them there."""

    def __init__(self, llm: LLM, scope: str, owner: str | None):
        """scope: in which to cache the tokens; owner: which the snapshots must have, None for any"""
        self.llm = llm
        self.scope = scope
        self.owner = owner
        self.splitter = SnapshotSplitter(max_snapshot_bytes(llm))
        self.token_ids: list[int] = []  # of the snapshots so far
        self.packed = b""  # the same as int32
        self.nbytes = 0
        self.serial: int | None = None  # of the last block

    def add(self, content: Buffer) -> list[bytearray]:
        """Return the snapshots that this content completes, for `install`. Raises UsageError."""
        self.nbytes += memoryview(content).nbytes
        try:
            return list(self.splitter.add(content))
        except DamagedSnapshot as error:
            raise refusal(error) from None

    def install(self, content: bytearray) -> None:
        """Copy a snapshot into the caches. Raises UsageError if it does not belong to this model or does not
        follow the one before, ContextOverflow, and Busy if running requests leave no room."""
        try:
            snapshot = KVSnapshot.parse(content)
            self.check(snapshot)
            self.llm.worker.call(lambda: self.copy(snapshot))
        except DamagedSnapshot as error:
            raise refusal(error) from None
        except OutOfBlocks:
            raise self.no_room() from None

    def check(self, snapshot: KVSnapshot) -> None:
        """Check that a snapshot follows the one before. Raises DamagedSnapshot and ContextOverflow."""
        tokens, size = snapshot.tokens, self.llm.block_tokens
        if (tokens.start, tokens.token_ids[: len(self.packed)]) != (len(self.token_ids), self.packed):
            raise DamagedSnapshot("its parts do not follow each other")
        lengths = (tokens.start, tokens.end, *tokens.states)
        if any(length % size for length in lengths) or not all(
            tokens.start < length <= tokens.end for length in tokens.states
        ):
            raise DamagedSnapshot("its tokens are malformed")
        if self.owner is not None and tokens.identity.scope != self.owner:
            raise DamagedSnapshot("it belongs to another API key")
        if tokens.end > self.llm.context:
            raise ContextOverflow(tokens.end, self.llm.context, "load the model with a larger --context")

    def copy(self, snapshot: KVSnapshot) -> None:
        """Runs on the engine's thread."""
        engine, tokens = self.llm.worker.engine, snapshot.tokens
        runner, pool = engine.runner, engine.pool
        identity = with_frequencies(self.llm.cache_identity, runner)
        if difference := identity.difference(tokens.identity):
            raise DamagedSnapshot(f"it was computed with another {difference}")
        if self.serial is not None and self.serial not in pool.serial_of.values():
            raise OutOfBlocks
        engine.scheduler.discard_timing()
        self.token_ids.extend(array("i", tokens.token_ids[len(self.packed) :]))
        self.packed = tokens.token_ids
        room = max(1, pool.state_slots.free_count)
        self.serial, _ = copy_in(
            runner,
            pool,
            snapshot,
            self.token_ids,
            tokens.end // pool.block_size,
            pool.root_of(self.scope) if self.serial is None else self.serial,
            self.scope,
            sorted(tokens.states)[-room:],
        )

    def finish(self) -> None:
        """Check that all tokens have arrived and are still cached. Raises UsageError and Busy."""
        try:
            self.splitter.finish()
        except DamagedSnapshot as error:
            raise refusal(error) from None
        pool = self.llm.worker.engine.pool
        serials, _ = self.llm.worker.call(lambda: pool.cached_blocks(self.token_ids, self.scope))
        if len(serials) * pool.block_size < len(self.token_ids):
            raise self.no_room()

    def no_room(self) -> Busy:
        return Busy("the KV cache has no room for all tokens of the state")


def refusal(error: DamagedSnapshot) -> UsageError:
    return UsageError(f"the state cannot be used: {error}", "save it again with this model and these options")


def max_snapshot_bytes(llm: LLM) -> int:
    """Return the size that no snapshot of this model exceeds."""
    types = all_types(llm.worker.engine.runner)
    block_bytes = llm.block_tokens * types.row_bytes + types.state_bytes
    return MAX_HEADER_BYTES + 4 * llm.context + SEGMENT_BLOCKS * block_bytes

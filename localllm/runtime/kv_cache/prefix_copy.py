"""Copies of cached prefixes: out of the caches as snapshots, and from snapshots into them, where later prompts
find their tokens. The disk tier, saved slots and states that move to another server are built from these.

All functions run on the engine's thread, between two steps.
"""

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import replace

import torch
from torch import Tensor

from localllm.runtime.kv_cache.host_copies import CacheTypes, HostCopy, to_tensors
from localllm.runtime.kv_cache.sequence_state import BlockPool, CacheCopies
from localllm.runtime.kv_cache.snapshot import (
    CacheIdentity,
    DamagedSnapshot,
    KVSnapshot,
    SnapshotTokens,
    token_bytes,
)
from localllm.runtime.layers.rope import inverse_frequencies
from localllm.runtime.runner import Runner

SEGMENT_BLOCKS = 16  # blocks of a snapshot: 256 tokens, 8 MiB of a 1B model in bfloat16


def frequencies_digest(runner: Runner) -> str:
    """Return a digest of the rotary frequencies: LongRoPE's depend on the context that is allocated."""
    digest = hashlib.sha256()
    for rope in runner.model.config.ropes:
        frequencies, magnitude = inverse_frequencies(rope, runner.model.max_len)
        digest.update(frequencies.numpy().tobytes() + str(magnitude).encode())
    return digest.hexdigest()[:16]


def with_frequencies(identity: CacheIdentity, runner: Runner) -> CacheIdentity:
    """Add the rotary frequencies to an identity."""
    return replace(identity, setup=(*identity.setup, frequencies_digest(runner)))


def all_types(runner: Runner) -> CacheTypes:
    """Return the types of the cache tensors of all ranks."""
    ranks, own = runner.model.ranks, runner.named_caches.types
    return own.joined(ranks.other_caches.types) if ranks else own


def copy_out(runner: Runner, pool: BlockPool, blocks: ListLike[int], state_slots: Mapping[int, int]) -> HostCopy:
    """Copy blocks of all ranks to the host. state_slots: the recurrent states to copy, by their lengths"""
    copies, ranks = pool.drain_copies(), runner.model.ranks
    others = ranks.other_caches.copy_out(copies, blocks, state_slots) if ranks else None
    own = copy_out_own(runner, copies, blocks, state_slots)
    return own.joined(others) if others else own


def copy_out_own(
    runner: Runner, copies: CacheCopies, blocks: ListLike[int], state_slots: Mapping[int, int]
) -> HostCopy:
    """Copy blocks of this process to the host. copies: pending ones, executed before, as this is out of turn"""
    runner.apply_copies(copies)
    on_gpu = runner.device.type == "cuda"
    stream = torch.cuda.current_stream(runner.device) if on_gpu else None
    if stream and any(block >= runner.device_blocks for block in blocks):
        stream.synchronize()  # which may be filling the host tier
    with runner.move_clock.measure(device_to_host=len(blocks) * runner.block_bytes):
        tensors = runner.named_caches.pack(blocks, state_slots)
    event = torch.cuda.Event() if stream else None
    if event:
        event.record(stream)

    def wait() -> dict[str, Tensor]:
        if event:
            event.synchronize()
        return tensors

    return HostCopy(sum(tensor.nbytes for tensor in tensors.values()), wait)


def copy_in(
    runner: Runner,
    pool: BlockPool,
    snapshot: KVSnapshot,
    token_ids: ListLike[int],
    end: int,
    parent: int,
    scope: str,
    state_lengths: ListLike[int],
) -> tuple[int, int]:
    """Copy the blocks of a snapshot that are missing in memory into the caches, and add them to the prefix index.

    end: blocks of the sequence at which to stop; parent: serial of the block before the snapshot, which is cached;
    state_lengths: of the recurrent states to copy, at ends of these blocks. Returns the serial of the last block,
    and how many blocks were copied. Raises DamagedSnapshot, before anything is written, and OutOfBlocks.
    """
    size = pool.block_size
    first = begin = snapshot.tokens.start // size
    serials = {begin * size: parent}
    while begin < end:
        key = (parent, *token_ids[begin * size : (begin + 1) * size])
        if key not in pool.cached:
            break
        parent, begin = pool.serial_of[key], begin + 1
        serials[begin * size] = parent
    wanted = slice((begin - first) * size, (end - first) * size)
    rows = {name: tensor[wanted] for name, tensor in to_tensors(snapshot.cache_parts).items()}
    states = {length: to_tensors(snapshot.state_parts(length)) for length in state_lengths}
    all_types(runner).check(rows, states.values())
    if any(len(tensor) != wanted.stop - wanted.start for tensor in rows.values()):
        raise DamagedSnapshot("its tensors have fewer rows than tokens")
    blocks, slots = list[int](), dict[int, int]()
    try:
        for _ in range(begin, end):
            blocks.append(pool.allocate(blocks[-1] if blocks else None))
        for length in state_lengths:
            slots[length] = pool.state_slots.allocate()
        copies, by_slot = pool.drain_copies(), {slot: states[length] for length, slot in slots.items()}
        if ranks := runner.model.ranks:
            ranks.other_caches.copy_in(copies, blocks, rows, by_slot)
        copy_in_own(runner, copies, blocks, rows, by_slot)
        for index, block in enumerate(blocks, begin + 1):
            parent = pool.cache_block(block, parent, token_ids, index * size, scope)
            serials[index * size] = parent
        for length, slot in slots.items():
            if length in serials:
                pool.state_slots.add_to_index(slot, serials[length])
    finally:
        for block in blocks:
            pool.release(block)
        for slot in slots.values():
            pool.state_slots.release(slot)
    return parent, len(blocks)


def copy_in_own(
    runner: Runner,
    copies: CacheCopies,
    blocks: ListLike[int],
    rows: Mapping[str, Tensor],
    states: Mapping[int, Mapping[str, Tensor]],
) -> None:
    """Fill blocks and state slots of this process. copies: as in `copy_out_own`; the others: see
    `NamedCaches.unpack`"""
    runner.apply_copies(copies)
    with runner.move_clock.measure(host_to_device=len(blocks) * runner.block_bytes):
        runner.named_caches.unpack(blocks, rows, states)


class PrefixExport(Iterator[tuple[SnapshotTokens, HostCopy]]):
    """Copies of the longest cached prefix of some tokens, a segment at a time. Ends early if a block is evicted
    meanwhile."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        identity: CacheIdentity,
        token_ids: ListLike[int],
        scope: str,
        *,
        start: int = 0,
        only_last_state: bool = False,
    ):
        """identity: written into the snapshots; scope: in which the prefix is cached; start: tokens to leave out,
        whole blocks; only_last_state: leave out the recurrent states before the end"""
        self.runner, self.pool = runner, pool
        self.identity = identity
        self.scope = scope
        self.serials, _ = pool.cached_blocks(token_ids, scope)
        del self.serials[pool.reusable_count(self.serials) :]
        self.token_ids = list(token_ids[: self.length])
        self.position = start // pool.block_size  # blocks that were copied or left out
        self.only_last_state = only_last_state

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return len(self.serials) * self.pool.block_size

    def __next__(self) -> tuple[SnapshotTokens, HostCopy]:
        pool, size, begin = self.pool, self.pool.block_size, self.position
        end = min(begin + SEGMENT_BLOCKS, len(self.serials))
        parent = self.serials[begin - 1] if begin else pool.root_of(self.scope)
        blocks, slots = list[int](), dict[int, int]()
        for index in range(begin, end):
            key = (parent, *self.token_ids[index * size : (index + 1) * size])
            parent = self.serials[index]
            if pool.serial_of.get(key) != parent:
                raise StopIteration
            blocks.append(pool.cached[key])
            if parent in pool.state_slots.cached and not (self.only_last_state and index + 1 < len(self.serials)):
                slots[(index + 1) * size] = pool.state_slots.cached[parent]
        if not blocks:
            raise StopIteration
        self.position = end
        tokens = SnapshotTokens(
            self.identity, begin * size, token_bytes(self.token_ids[: end * size]), frozenset(slots)
        )
        return tokens, copy_out(self.runner, pool, blocks, slots)

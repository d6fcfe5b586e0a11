"""Copies of cached prefixes: out of the caches as snapshots, and from snapshots into them, where later prompts
find their tokens. The disk tier, saved slots and states that move to another server are built from these.

All functions run on the engine's thread, between two steps.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.checkpoint.tensors import TORCH_DTYPES
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.kv_cache.snapshot import (
    CacheIdentity,
    DamagedSnapshot,
    KVSnapshot,
    Part,
    SnapshotTokens,
    token_bytes,
)
from localllm.runtime.kv_cache.tensors import pack_caches, unpack_caches
from localllm.runtime.runner import Runner

SEGMENT_BLOCKS = 16  # blocks of a snapshot: 256 tokens, 8 MiB of a 1B model in bfloat16
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class CopiedBlocks(NamedTuple):
    """Blocks and recurrent states on the host, once `wait` has returned."""

    tensors: dict[str, Tensor]
    wait: Callable[[], object]  # for the device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def snapshot(self, tokens: SnapshotTokens) -> KVSnapshot:
        """Return the snapshot of these tokens, which shares the memory of the tensors."""
        self.wait()
        return KVSnapshot(tokens, {name: to_part(tensor) for name, tensor in self.tensors.items()})


def frequencies_digest(runner: Runner) -> str:
    """Return a digest of the rotary frequencies: LongRoPE's depend on the context that is allocated."""
    frequencies = hashlib.sha256()
    for rope in runner.model.ropes.values():
        frequencies.update(rope.frequencies.cpu().numpy().tobytes() + str(rope.magnitude).encode())
    return frequencies.hexdigest()[:16]


def with_frequencies(identity: CacheIdentity, runner: Runner) -> CacheIdentity:
    """Add the rotary frequencies to an identity."""
    return replace(identity, setup=(*identity.setup, frequencies_digest(runner)))


def flush_copies(runner: Runner, pool: BlockPool) -> None:
    """Execute the pending copies now, since blocks are read or written out of turn."""
    runner.apply_copies(pool.drain_copies())


def copy_out(
    runner: Runner, pool: BlockPool, blocks: ListLike[int], state_slots: Mapping[int, int]
) -> CopiedBlocks:
    """Copy blocks to the host. state_slots: the recurrent states to copy, by their lengths"""
    flush_copies(runner, pool)
    nbytes = len(blocks) * runner.block_bytes
    if runner.device.type != "cuda":
        with runner.move_clock.measure(device_to_host=nbytes):
            tensors = pack_caches(runner.paged_caches, runner.recurrent_caches, blocks, state_slots)
        return CopiedBlocks(tensors, lambda: None)
    stream = torch.cuda.current_stream(runner.device)
    if any(block >= pool.count for block in blocks):
        stream.synchronize()  # which may be filling the host tier
    with runner.move_clock.measure(device_to_host=nbytes):
        tensors = pack_caches(runner.paged_caches, runner.recurrent_caches, blocks, state_slots)
    event = torch.cuda.Event()
    event.record(stream)
    return CopiedBlocks(tensors, event.synchronize)


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
    rows = slice((begin - first) * size, (end - first) * size)
    parts = {name: tensor[rows] for name, tensor in to_tensors(snapshot.cache_parts).items()}
    if any(len(tensor) != rows.stop - rows.start for tensor in parts.values()):
        raise DamagedSnapshot("its tensors have fewer rows than tokens")
    blocks, slots = list[int](), dict[int, int]()
    try:
        for _ in range(begin, end):
            blocks.append(pool.allocate(blocks[-1] if blocks else None))
        for length in state_lengths:
            slots[length] = pool.state_slots.allocate()
        flush_copies(runner, pool)
        states = {slot: to_tensors(snapshot.state_parts(length)) for length, slot in slots.items()}
        with runner.move_clock.measure(host_to_device=len(blocks) * runner.block_bytes):
            unpack_caches(runner.paged_caches, runner.recurrent_caches, blocks, parts, states)
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


class PrefixExport(Iterator[tuple[SnapshotTokens, CopiedBlocks]]):
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

    def __next__(self) -> tuple[SnapshotTokens, CopiedBlocks]:
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


def to_part(tensor: Tensor) -> Part:
    """Return a contiguous tensor on the host as bytes."""
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return Part(SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape), data.data)


def to_tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """Return tensors on the host that share the parts' memory."""
    return {
        name: torch.frombuffer(part.data, dtype=TORCH_DTYPES[part.dtype]).view(part.shape)
        for name, part in parts.items()
    }

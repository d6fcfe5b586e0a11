"""Access of rank 0 to the caches of other ranks: copies blocks out of them and into them, by messages between
steps.

Rank 0 alone writes and reads what is stored: a snapshot has the parts of all ranks, so that a prefix is stored, or
damaged, for all of them or for none.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from typing_extensions import Buffer

from localllm.parallel.channel import COPY_IN, COPY_OUT
from localllm.runtime.kv_cache.host_copies import CacheTypes, HostCopy, TensorType, bytes_of, to_part
from localllm.runtime.kv_cache.prefix_copy import copy_in_own, copy_out_own
from localllm.runtime.kv_cache.sequence_state import CacheCopies
from localllm.runtime.kv_cache.tiers import CopyRun
from localllm.runtime.runner import Runner


class RemoteCaches:
    """The caches of the other ranks. Requests are sent by one thread, and answered in their order."""

    def __init__(self, send: Callable[[int, int, Iterable[Buffer]], object]):
        """send: sends a message, given by its kind and content, to the other rank with this index"""
        self.send = send
        self.types: Sequence[CacheTypes] = ()
        self.block_size = 0
        self.lock = threading.Lock()
        self.awaited: list[deque[Future[bytearray]]] = []  # by each other rank
        self.error: Exception | None = None

    def connect(self, types: Sequence[CacheTypes], block_size: int) -> None:
        """Set the types of each other rank, before anything is copied."""
        self.types = types
        self.block_size = block_size
        self.awaited = [deque() for _ in types]

    def copy_out(self, copies: CacheCopies, blocks: Sequence[int], state_slots: Mapping[int, int]) -> HostCopy:
        """See `Ranks.copy_out`."""
        futures = [Future[bytearray]() for _ in self.types]
        with self.lock:
            if self.error:
                raise self.error
            for awaited, future in zip(self.awaited, futures, strict=True):
                awaited.append(future)
        header = encode_header(copies, blocks, sorted(state_slots.items()))
        for index in range(len(self.types)):
            self.send(index, COPY_OUT, [header])
        rows = len(blocks) * self.block_size

        def wait() -> dict[str, Tensor]:
            tensors = dict[str, Tensor]()
            for types, future in zip(self.types, futures, strict=True):
                content, offset = future.result(), 0
                for name, tensor_type in layout(types, rows, sorted(state_slots)):
                    tensors[name] = tensor_at(content, offset, tensor_type)
                    offset += bytes_of(tensor_type)
            return tensors

        nbytes = sum(rows * types.row_bytes + len(state_slots) * types.state_bytes for types in self.types)
        return HostCopy(nbytes, wait)

    def copy_in(
        self,
        copies: CacheCopies,
        blocks: Sequence[int],
        rows: Mapping[str, Tensor],
        states: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        """See `Ranks.copy_in`."""
        header = encode_header(copies, blocks, [(slot, slot) for slot in states])
        for index, types in enumerate(self.types):
            tensors = [rows[name] for name in types.rows]
            tensors += [state[name] for state in states.values() for name in types.states]
            self.send(index, COPY_IN, [header, *(to_part(tensor).data for tensor in tensors)])

    def receive(self, index: int, content: bytearray) -> None:
        """Take the answer of another rank to the oldest request for a copy."""
        with self.lock:
            future = self.awaited[index].popleft()
        future.set_result(content)

    def fail(self, error: Exception) -> None:
        """End all waiting: another rank has ended."""
        with self.lock:
            self.error = self.error or error
            futures = [future for awaited in self.awaited for future in awaited]
            for awaited in self.awaited:
                awaited.clear()
        for future in futures:
            future.set_exception(self.error)


def answer_copy_out(runner: Runner, message: bytearray) -> HostCopy:
    """Copy out what rank 0 requests, of this rank's caches. The copy's tensors, one after the other, are the
    answer."""
    copies, blocks, states, _ = decode_header(message)
    return copy_out_own(runner, copies, blocks, dict(states))


def answer_copy_in(runner: Runner, message: bytearray, block_size: int) -> None:
    """Fill this rank's caches with what rank 0 has sent."""
    copies, blocks, states, offset = decode_header(message)
    types = runner.named_caches.types
    tensors = dict[str, Tensor]()
    for name, tensor_type in layout(types, len(blocks) * block_size, [slot for slot, _ in states]):
        tensors[name] = tensor_at(message, offset, tensor_type)
        offset += bytes_of(tensor_type)
    rows = {name: tensors[name] for name in types.rows}
    by_slot = {slot: {name: tensors[f"state.{slot}.{name}"] for name in types.states} for slot, _ in states}
    copy_in_own(runner, copies, blocks, rows, by_slot)


def layout(types: CacheTypes, rows: int, states: Iterable[int]) -> Iterator[tuple[str, TensorType]]:
    """Yield the tensors of a message in their order."""
    for name, (dtype, shape) in types.rows.items():
        yield name, (dtype, (rows, *shape))
    for state in states:
        for name, tensor_type in types.states.items():
            yield f"state.{state}.{name}", tensor_type


def tensor_at(content: bytearray, offset: int, tensor_type: TensorType) -> Tensor:
    """Return a tensor that shares the memory of a message."""
    dtype, shape = tensor_type
    if not (size := bytes_of(tensor_type)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8, count=size, offset=offset).view(dtype).view(shape)


def encode_header(copies: CacheCopies, blocks: Sequence[int], states: Sequence[tuple[int, int]]) -> bytes:
    """Return the beginning of a message, padded so that tensors are aligned."""
    content = json.dumps([copies.blocks, copies.states, list(blocks), states], separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def decode_header(
    message: bytearray,
) -> tuple[CacheCopies, list[int], list[tuple[int, int]], int]:
    """Return copies, blocks and states, and where the tensors begin."""
    end = 8 + int.from_bytes(message[:8], "little")
    runs, pairs, blocks, states = json.loads(message[8:end])
    copies = CacheCopies(tuple(CopyRun(*run) for run in runs), tuple((a, b) for a, b in pairs))
    return copies, blocks, [(a, b) for a, b in states], end

"""Messages between the processes that compute prompts and those that answer, and how keys and values get from one
to the other: on one machine through memory that both map, between machines over a connection
(`tensor_stream.py`). Another transport, such as NIXL between GPUs, implements Sender and Receiver.
"""

import json
import mmap
import struct
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from localllm.metrics import TierMove
from localllm.parallel.channel import open_memory
from localllm.runtime.kv_cache.host_copies import to_part
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot, Part

# Kinds of messages, besides SETUP, LOADED and FAILED. A process that ends sends none: its socket is closed.
PROMPT, CANCEL, SEGMENT, TAKEN, DONE = range(32, 37)
TENSORS, PING, PONG = range(37, 40)  # between machines
ALIGNMENT = 64  # bytes, of tensors in a slot
SLOTS = 4  # segments on their way to one process
MAX_TENSORS = 4096  # of a segment, for whose alignment a slot has room
TOKENS = struct.Struct("<q")  # at the beginning of shared memory: what `report` was called with
HEADER_BYTES = ALIGNMENT


class Message(NamedTuple):
    """Fields as JSON, and token ids as 32-bit integers."""

    fields: dict[str, Any]
    token_ids: ListLike[int] = ()

    def encode(self) -> bytes:
        fields = json.dumps(self.fields, separators=(",", ":")).encode()
        return len(fields).to_bytes(4, "little") + fields + array("i", self.token_ids).tobytes()

    @classmethod
    def decode(cls, content: bytes | bytearray) -> "Message":
        end = 4 + int.from_bytes(content[:4], "little")
        return cls(json.loads(content[4:end]), array("i", content[end:]).tolist())


class Sender(Protocol):
    """The end of a transport at the process that has computed keys and values."""

    @property
    def has_room(self) -> bool:
        """Whether `put` can be called."""
        ...

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Make tensors of the host available, and return where, as JSON."""
        ...

    def release(self, location: Mapping[str, Any]) -> None:
        """Free what `put` has returned, which was taken."""
        ...

    def report(self, tokens: int) -> None:
        """Tell the receiver how many tokens of others' prompts are computed before its next one."""
        ...

    def close(self) -> None:
        """Free the memory, as the receiver has ended."""
        ...


class Receiver(Protocol):
    """The end of a transport at the process that continues with keys and values."""

    @property
    def reported(self) -> int:
        """The number of tokens that the sender has reported last; 0 over a network."""
        ...

    def get(self, location: Mapping[str, Any]) -> dict[str, Part]:
        """Return the tensors that a sender has put there. They are valid until it hears that they were taken.
        Raises DamagedSnapshot if they are not there."""
        ...

    @property
    def received(self) -> TierMove:
        """Bytes received over a network, and the time from the first to the last."""
        ...


class SharedMemory:
    """Memory that two processes map, in slots of one size: both a Sender and a Receiver."""

    def __init__(self, descriptor: int, slot_bytes: int):
        """descriptor: of a file that `open_slots` has opened. It is not closed."""
        self.slot_bytes = slot_bytes
        self.memory = mmap.mmap(descriptor, HEADER_BYTES + SLOTS * slot_bytes)
        self.free_slots = list(range(SLOTS))

    @property
    def has_room(self) -> bool:
        return bool(self.free_slots)

    def put(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        slot = self.free_slots.pop()
        begin = HEADER_BYTES + slot * self.slot_bytes
        parts, end = lay_out(tensors, begin)
        assert end <= begin + self.slot_bytes
        for name, tensor in tensors.items():
            if tensor.nbytes:
                _, _, offset = parts[name]
                target = torch.frombuffer(self.memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
                target.copy_(tensor.reshape(-1).view(torch.uint8))
        return {"slot": slot, "parts": parts, "bytes": end - begin}

    def release(self, location: Mapping[str, Any]) -> None:
        self.free_slots.append(location["slot"])

    def report(self, tokens: int) -> None:
        TOKENS.pack_into(self.memory, 0, tokens)

    @property
    def reported(self) -> int:
        return TOKENS.unpack_from(self.memory)[0]

    def close(self) -> None:
        self.memory.close()

    def get(self, location: Mapping[str, Any]) -> dict[str, Part]:
        return parts_in(memoryview(self.memory), location["parts"])

    @property
    def received(self) -> TierMove:
        return TierMove()


def lay_out(tensors: Mapping[str, Tensor], begin: int) -> tuple[dict[str, Any], int]:
    """Return dtype, shape and offset of each tensor behind a beginning, one after the other, and the end."""
    parts, offset = dict[str, Any](), begin
    for name, tensor in tensors.items():
        part = to_part(tensor)
        parts[name] = [part.dtype, part.shape, offset]
        offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return parts, offset


def parts_in(content: memoryview, places: Mapping[str, Any]) -> dict[str, Part]:
    """Return the tensors of `content` at the places that `lay_out` has chosen. Raises DamagedSnapshot if one is
    not within the content."""
    parts = dict[str, Part]()
    for name, (dtype, shape, offset) in places.items():
        part = Part(dtype, tuple(shape), b"")
        if not 0 <= offset <= offset + part.nbytes <= len(content):
            raise DamagedSnapshot("its tensors are incomplete")
        parts[name] = part._replace(data=content[offset : offset + part.nbytes])
    return parts


def open_slots(segment_bytes: int) -> tuple[int, int]:
    """Return the descriptor of memory for segments of `segment_bytes` bytes, and the bytes of its slots."""
    slot_bytes = segment_bytes + MAX_TENSORS * ALIGNMENT
    slot_bytes += -slot_bytes % mmap.PAGESIZE
    return open_memory(HEADER_BYTES + SLOTS * slot_bytes), slot_bytes

"""A snapshot of a sequence's keys and values as bytes: a safetensors file with one contiguous tensor per cache
part.

The file begins with its identity, what its values depend on, and all token ids up to its last token; it ends with
the SHA-256 of everything before. A reader therefore never trusts a hash of the tokens, only the tokens. No torch.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Buffer

FORMAT = "localllm-kv-2"
TOKENS, CHECKSUM = "token_ids", "checksum"
CHECKSUM_BYTES = 32
MAX_HEADER_BYTES = 2**22
PEEK_BYTES = 2**15  # read at once for header and tokens; more if they are longer
PART_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}


IDENTITY_WORDS = {
    "model": "model",
    "dtype": "data type (--dtype)",
    "kv_dtype": "data type of the KV cache (--kv-dtype)",
    "activation_bits": "number of activation bits (--activations)",
    "block_size": "block size",
    "layers": "number of layers",
    "division": "division among processes (--tensor-parallel, --expert-parallel)",
    "setup": "processor, context or version of localllm or its libraries",
}


class DamagedSnapshot(ValueError):
    """A file is not a snapshot, or has changed since it was written."""


@dataclass(frozen=True)
class CacheIdentity:
    """The properties that two processes must share for keys and values of one to be those of the other."""

    model: str  # digest of the files that affect logits
    name: str  # of the model, for messages
    dtype: str
    kv_dtype: str
    activation_bits: int
    block_size: int
    layers: int
    setup: tuple[str, ...]  # instructions, libraries, rotary frequencies: they affect the last bits
    scope: str = ""  # digest of the API key whose requests may use it; "" for all
    division: str = ""  # among processes that sum up results; "" for one, and for stages, which have its bits

    @cached_property
    def key(self) -> bytes:
        """Digest of all properties but the name."""
        return hashlib.sha256(json.dumps(asdict(self) | {"name": ""}).encode()).digest()

    def difference(self, other: "CacheIdentity") -> str | None:
        """Return which property other than the scope differs, for messages; None if none does."""
        for name, words in IDENTITY_WORDS.items():
            if getattr(self, name) != getattr(other, name):
                return words
        return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CacheIdentity":
        """Raises DamagedSnapshot."""
        try:
            fields = json.loads(text)
            return cls(**fields | {"setup": tuple(fields["setup"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedSnapshot("its identity is malformed") from None


class Part(NamedTuple):
    """A tensor as bytes."""

    dtype: str  # of safetensors
    shape: tuple[int, ...]
    data: Buffer  # contiguous

    @property
    def nbytes(self) -> int:
        return PART_BYTES[self.dtype] * prod(self.shape)


class SnapshotTokens(NamedTuple):
    """The tokens of a snapshot: `token_ids[start:]`, which follow `token_ids[:start]`."""

    identity: CacheIdentity
    start: int
    token_ids: bytes  # int32
    states: frozenset[int]  # lengths at which it has the recurrent state

    @property
    def end(self) -> int:
        return len(self.token_ids) // 4

    def is_part_of(self, other: "SnapshotTokens") -> bool:
        """Return whether `other` holds at least as much."""
        return (
            (self.start, self.identity.key) == (other.start, other.identity.key)
            and other.token_ids.startswith(self.token_ids)
            and self.states <= other.states
        )


@dataclass(frozen=True)
class KVSnapshot:
    """The keys and values of `token_ids[start:]`, and recurrent states at block boundaries among them.

    parts: tensors with one row per token, named as in `host_copies.py`, and states named state.LENGTH.NAME.
    """

    tokens: SnapshotTokens
    parts: Mapping[str, Part]

    @property
    def cache_parts(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if not name.startswith("state.")}

    def state_parts(self, length: int) -> dict[str, Part]:
        """Return the tensors of the recurrent state after `length` tokens, by their names."""
        prefix = f"state.{length}."
        return {name.removeprefix(prefix): part for name, part in self.parts.items() if name.startswith(prefix)}

    @cached_property
    def header(self) -> bytes:
        fields: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "identity": self.tokens.identity.to_json(),
                "start": str(self.tokens.start),
            }
        }
        token_ids = Part("I32", (self.tokens.end,), self.tokens.token_ids)
        end = 0
        for name, part in {TOKENS: token_ids, **self.parts}.items():
            begin, end = end, end + memoryview(part.data).nbytes
            fields[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
        fields[CHECKSUM] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": [end, end + CHECKSUM_BYTES]}
        header = json.dumps(fields, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        parts = sum(memoryview(part.data).nbytes for part in self.parts.values())
        return len(self.header) + len(self.tokens.token_ids) + parts + CHECKSUM_BYTES

    def chunks(self) -> Iterator[Buffer]:
        """Yield the bytes of the file, without copying any tensor."""
        checksum = hashlib.sha256()
        for chunk in (self.header, self.tokens.token_ids, *(part.data for part in self.parts.values())):
            checksum.update(chunk)
            yield chunk
        yield checksum.digest()

    @classmethod
    def parse(cls, content: Buffer) -> "KVSnapshot":
        """Check and parse the content of a file; the parts refer to it. Raises DamagedSnapshot."""
        view = memoryview(content).cast("B")
        if len(view) < 8 + CHECKSUM_BYTES:
            raise DamagedSnapshot("it is truncated")
        if hashlib.sha256(view[:-CHECKSUM_BYTES]).digest() != view[-CHECKSUM_BYTES:]:
            raise DamagedSnapshot("its checksum differs")
        tokens, spans, data_start = parse_header(view)
        data = view[data_start:-CHECKSUM_BYTES]
        parts, end = dict[str, Part](), 0
        for name, (dtype, shape, begin, stop) in spans.items():
            if begin != end or stop > len(data) or PART_BYTES.get(dtype, 4) * prod(shape) != stop - begin:
                raise DamagedSnapshot(f"its tensor {name} is malformed")
            end = stop
            if name != TOKENS:
                if dtype not in PART_BYTES:
                    raise DamagedSnapshot(f"its tensor {name} is stored as {dtype}")
                parts[name] = Part(dtype, shape, data[begin:stop])
        if end != len(data):
            raise DamagedSnapshot("the size of its tensors is not that of the file")
        return cls(tokens, parts)


def read_tokens(file: Path) -> SnapshotTokens:
    """Read which tokens a file holds, without checking the rest. Raises DamagedSnapshot and OSError."""
    with file.open("rb") as stream:
        content = stream.read(PEEK_BYTES)
        for _ in range(3):
            try:
                return parse_header(memoryview(content))[0]
            except TruncatedHeader as error:
                content += stream.read(error.needed - len(content))
        raise DamagedSnapshot("it is truncated")


class SnapshotSplitter:
    """Divides a stream of bytes into the snapshots that it consists of."""

    def __init__(self, max_bytes: int):
        """max_bytes: of one snapshot; a longer one is refused before its content is read"""
        self.max_bytes = max_bytes
        self.beginning = bytearray()  # of a snapshot, up to the end of its header
        self.snapshot: bytearray | None = None  # of which `filled` bytes have arrived
        self.filled = 0

    def add(self, content: Buffer) -> Iterator[bytearray]:
        """Yield the snapshots that this content completes. Raises DamagedSnapshot."""
        rest = memoryview(content).cast("B")
        while rest:
            if self.snapshot is None:
                rest = self.add_to_beginning(rest)
            else:
                part = rest[: len(self.snapshot) - self.filled]
                self.snapshot[self.filled : self.filled + len(part)] = part
                self.filled, rest = self.filled + len(part), rest[len(part) :]
            if self.snapshot is not None and self.filled == len(self.snapshot):
                complete, self.snapshot = self.snapshot, None
                yield complete

    def add_to_beginning(self, rest: memoryview) -> memoryview:
        """Add content up to the end of the header, and return what follows."""
        known = int.from_bytes(self.beginning[:8], "little") if len(self.beginning) >= 8 else 0
        part = rest[: 8 + known - len(self.beginning)]
        self.beginning += part
        if len(self.beginning) >= 8:
            length = int.from_bytes(self.beginning[:8], "little")
            if length > MAX_HEADER_BYTES:
                raise DamagedSnapshot("it is not a snapshot")
            if len(self.beginning) == 8 + length:
                self.snapshot = bytearray(self.size_of_snapshot(self.beginning))
                self.filled = len(self.beginning)
                self.snapshot[: self.filled] = self.beginning
                self.beginning.clear()
        return rest[len(part) :]

    def size_of_snapshot(self, beginning: bytearray) -> int:
        """Return the bytes of the snapshot with this header. Raises DamagedSnapshot."""
        try:
            size = len(beginning) + int(json.loads(beginning[8:])[CHECKSUM]["data_offsets"][1])
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise DamagedSnapshot("its header is malformed") from None
        if not len(beginning) + CHECKSUM_BYTES <= size <= self.max_bytes:
            raise DamagedSnapshot(f"a part of it has {size:,} bytes, of at most {self.max_bytes:,}")
        return size

    def finish(self) -> None:
        """Raises DamagedSnapshot if the stream has ended within a snapshot."""
        if self.beginning or self.snapshot is not None:
            raise DamagedSnapshot("it is truncated")


class TruncatedHeader(DamagedSnapshot):
    def __init__(self, needed: int):
        super().__init__("it is truncated")
        self.needed = needed  # bytes from the beginning of the file


def parse_header(view: memoryview) -> tuple[SnapshotTokens, dict[str, tuple[str, tuple[int, ...], int, int]], int]:
    """Parse the beginning of a file: tokens, (dtype, shape, begin, end) of each tensor but the checksum, and the
    offset of the data. Raises DamagedSnapshot; TruncatedHeader if `view` ends too early."""
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise DamagedSnapshot("it is not a snapshot")
    data_start = 8 + length
    if len(view) < data_start:
        raise TruncatedHeader(data_start)
    try:
        fields = json.loads(bytes(view[8:data_start]))
        metadata = fields.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise DamagedSnapshot("it has another format")
        start = int(metadata["start"])
        identity = CacheIdentity.from_json(metadata["identity"])
        fields.pop(CHECKSUM)
        spans = dict[str, tuple[str, tuple[int, ...], int, int]]()
        for name, entry in fields.items():
            begin, end = map(int, entry["data_offsets"])
            spans[name] = str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end
        begin, end = spans[TOKENS][2:]
        states = frozenset(int(name.split(".")[1]) for name in spans if name.startswith("state."))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise error if isinstance(error, DamagedSnapshot) else DamagedSnapshot("its header is malformed") from None
    if begin or end % 4 or not 0 <= start < end // 4:
        raise DamagedSnapshot("its tokens are malformed")
    if len(view) < data_start + end:
        raise TruncatedHeader(data_start + end)
    token_ids = bytes(view[data_start : data_start + end])
    return SnapshotTokens(identity, start, token_ids, states), spans, data_start


def token_bytes(token_ids: ListLike[int]) -> bytes:
    """Return token ids as int32, little-endian on every machine."""
    numbers = array("i", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()

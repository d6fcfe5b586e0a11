"""The header of one GGUF file, read from its memory map in order.

Trusts nothing: every count and length is compared with the file before it is used, and what a header may cost is
bounded whatever it says. Source: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.files import damaged
from localllm.quant.formats.gguf_types import BLOCK_TYPES, BY_NAME, NOT_RUN

ALIGNMENT = 32  # bytes, where general.alignment does not say
LARGEST_ALIGNMENT = 2**20
LONGEST_NAME = 2**16 - 1  # bytes; the specification's limit for keys
MOST_DIMENSIONS = 4
HEADER_LIMIT = 256 * 2**20  # bytes; the largest real ones, with 260,000 tokens and 500,000 merges, take 20 MB
MOST_ENTRIES = 2**21  # keys, tensors and elements of arrays together: 0.8 million in the largest real headers
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
LEAST_TENSOR_BYTES = 32  # of an entry in the header: lengths, a name of one byte, one dimension, type, offset
LEAST_KEY_BYTES = 14


@dataclass(frozen=True)
class GGUFTensor:
    file: Path
    format: str  # a name in quant/formats/gguf_types.py
    shape: tuple[int, ...]  # outermost first, as torch counts
    offset: int  # bytes from the begin of the file
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Cursor:
    """A place in the header that only moves on. Every read is checked against the end."""

    def __init__(self, file: Path, content: mmap.mmap):
        self.file = file
        self.content = content
        self.size = len(content)
        self.end = min(self.size, HEADER_LIMIT)
        self.at = 8
        self.entries = 0

    def header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        tensor_count, key_count = self.number("Q"), self.number("Q")
        self.count(tensor_count, LEAST_TENSOR_BYTES, "tensors")
        self.count(key_count, LEAST_KEY_BYTES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.name()
            if key in metadata:
                raise damaged(self.file, f"the key {key!r} stands in it twice")
            metadata[key] = self.value(key, self.number("I"))
        entries = [self.tensor() for _ in range(tensor_count)]
        alignment = self.alignment(metadata)
        start = -(-self.at // alignment) * alignment
        return metadata, self.placed(entries, start, alignment)

    def number(self, kind: str) -> Any:
        width = struct.calcsize(kind)
        self.room(width)
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += width
        return value

    def room(self, wanted: int) -> None:
        if wanted > self.end - self.at:
            where = "the file" if self.end == self.size else f"the {HEADER_LIMIT} bytes that a header may have"
            raise damaged(self.file, f"at byte {self.at} it wants {wanted} more, beyond the end of {where}")

    def count(self, number: int, least_bytes: int, what: str) -> None:
        """Refuses a count that the rest of the file cannot hold, or that would cost too much to read."""
        self.room(number * least_bytes)
        self.entries += number
        if self.entries > MOST_ENTRIES:
            raise damaged(self.file, f"it counts {number} {what}: more than any header holds")

    def bytes(self, limit: int) -> bytes:
        length = self.number("Q")
        if length > limit:
            raise damaged(self.file, f"at byte {self.at - 8} a name should be {length} bytes long")
        self.room(length)
        text = self.content[self.at : self.at + length]
        self.at += length
        return text

    def name(self) -> str:
        """Of a key or tensor: strictly UTF-8, as it decides what is read."""
        try:
            return self.bytes(LONGEST_NAME).decode()
        except UnicodeDecodeError as error:
            raise damaged(self.file, f"a name in it is not UTF-8 ({error})") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == ARRAY:
            return self.array(key)
        if kind == STRING:
            return text(self.bytes(HEADER_LIMIT))
        if kind not in NUMBERS:
            raise damaged(self.file, f"the value of {key!r} is of type {kind}, which does not exist")
        value = self.number(NUMBERS[kind])
        return self.truth(key, [value])[0] if kind == BOOL else value

    def array(self, key: str) -> list[Any]:
        kind, length = self.number("I"), self.number("Q")
        if kind == ARRAY:
            raise UnsupportedModel(f"{key!r} in {self.file} is an array of arrays", "no known model needs one")
        if kind == STRING:
            self.count(length, 8, f"texts in {key!r}")
            return self.texts(length)
        if kind not in NUMBERS:
            raise damaged(self.file, f"the array {key!r} is of type {kind}, which does not exist")
        width = struct.calcsize(NUMBERS[kind])
        self.count(length, width, f"numbers in {key!r}")
        values = list(struct.unpack_from(f"<{length}{NUMBERS[kind]}", self.content, self.at))
        self.at += length * width
        return self.truth(key, values) if kind == BOOL else values

    def truth(self, key: str, values: list[int]) -> list[bool]:
        if not set(values) <= {0, 1}:
            raise damaged(self.file, f"{key!r} holds something else than true and false")
        return [value == 1 for value in values]

    def texts(self, length: int) -> list[str]:
        """`value` for each, without the calls: a vocabulary has hundreds of thousands."""
        content, at, end, found = self.content, self.at, self.end, []
        read = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if at + 8 > end or (until := at + 8 + read(content, at)[0]) > end:
                self.at = at
                self.bytes(HEADER_LIMIT)  # raises with the place
                break
            found.append(content[at + 8 : until].decode(errors="replace"))
            at = until
        self.at = at
        return found

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Name, format, shape and offset within the tensors' part of the file."""
        name = self.name()
        dimensions = self.number("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise damaged(self.file, f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in BLOCK_TYPES:
            stated = NOT_RUN.get(kind, f"type {kind}")
            raise UnsupportedModel(
                f"the tensor {name!r} in {self.file} is stored as {stated.upper()}",
                f"known are {', '.join(t.name.upper() for t in BLOCK_TYPES.values())}",
            )
        if 0 in shape:
            raise damaged(self.file, f"the tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % BLOCK_TYPES[kind].elements:
            raise damaged(
                self.file,
                f"a row of {name!r} has {shape[-1]} elements, which are no whole blocks of "
                f"{BLOCK_TYPES[kind].elements} in {BLOCK_TYPES[kind].name.upper()}",
            )
        return name, BLOCK_TYPES[kind].name, shape, offset

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        if type(value) is not int or not 8 <= value <= LARGEST_ALIGNMENT or value & (value - 1):
            raise damaged(self.file, f"its alignment is {value!r}, not a power of two from 8")
        return value

    def placed(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """The tensors by name, each within the file and apart from the others."""
        tensors: dict[str, GGUFTensor] = {}
        for name, form, shape, offset in entries:
            nbytes = math.prod(shape[:-1]) * BY_NAME[form].row_bytes(shape[-1])
            if name in tensors:
                raise damaged(self.file, f"the tensor {name!r} stands in it twice")
            if offset % alignment:
                raise damaged(self.file, f"{name!r} lies at {offset}, which is no multiple of {alignment}")
            if start + offset + nbytes > self.size:
                missing = start + offset + nbytes - self.size
                raise damaged(self.file, f"{name!r} of shape {list(shape)} ends {missing} bytes beyond its end")
            tensors[name] = GGUFTensor(self.file, form, shape, start + offset, nbytes)
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise damaged(self.file, f"the tensor {name!r} overlaps another")
            end = tensor.offset + tensor.nbytes
        return tensors


def text(raw: bytes) -> str:
    """Values may hold bytes that are no UTF-8, as pieces of words in old vocabularies do: nothing that is typed or
    shown can contain them, so each becomes U+FFFD and the model stays usable."""
    return raw.decode(errors="replace")

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
from localllm.files import damaged_file
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME, BLOCK_TYPES, UNSUPPORTED_TYPES

ALIGNMENT = 32  # bytes, where general.alignment does not say
MAX_ALIGNMENT = 2**20
MAX_NAME_BYTES = 2**16 - 1  # bytes; the specification's limit for keys
MAX_DIMENSIONS = 4
HEADER_LIMIT = 256 * 2**20  # bytes; the largest real ones, with 260,000 tokens and 500,000 merges, take 20 MB
MAX_ENTRIES = 2**21  # keys, tensors and elements of arrays together: 0.8 million in the largest real headers
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
MIN_TENSOR_BYTES = 32  # of an entry in the header: lengths, a name of one byte, one dimension, type, offset
MIN_KEY_BYTES = 14


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


class HeaderReader:
    """A place in the header that only moves on. Every read is checked against the end."""

    def __init__(self, file: Path, content: mmap.mmap):
        self.file = file
        self.content = content
        self.size = len(content)
        self.end = min(self.size, HEADER_LIMIT)
        self.position = 8
        self.entry_count = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        tensor_count, key_count = self.read_number("Q"), self.read_number("Q")
        self.check_count(tensor_count, MIN_TENSOR_BYTES, "tensors")
        self.check_count(key_count, MIN_KEY_BYTES, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.read_name()
            if key in metadata:
                raise damaged_file(self.file, f"the key {key!r} stands in it twice")
            metadata[key] = self.read_value(key, self.read_number("I"))
        entries = [self.read_tensor() for _ in range(tensor_count)]
        alignment = self.read_alignment(metadata)
        start = -(-self.position // alignment) * alignment
        return metadata, self.locate_tensors(entries, start, alignment)

    def read_number(self, format: str) -> Any:
        width = struct.calcsize(format)
        self.require_bytes(width)
        (value,) = struct.unpack_from(f"<{format}", self.content, self.position)
        self.position += width
        return value

    def require_bytes(self, count: int) -> None:
        if count > self.end - self.position:
            where = "the file" if self.end == self.size else f"the {HEADER_LIMIT} bytes that a header may have"
            raise damaged_file(
                self.file, f"at byte {self.position} it wants {count} more, beyond the end of {where}"
            )

    def check_count(self, number: int, least_bytes: int, what: str) -> None:
        """Refuses a count that the rest of the file cannot hold, or that would cost too much to read."""
        self.require_bytes(number * least_bytes)
        self.entry_count += number
        if self.entry_count > MAX_ENTRIES:
            raise damaged_file(self.file, f"it counts {number} {what}: more than any header holds")

    def read_bytes(self, limit: int) -> bytes:
        length = self.read_number("Q")
        if length > limit:
            raise damaged_file(self.file, f"at byte {self.position - 8} a name should be {length} bytes long")
        self.require_bytes(length)
        text = self.content[self.position : self.position + length]
        self.position += length
        return text

    def read_name(self) -> str:
        """Of a key or tensor: strictly UTF-8, as it decides what is read."""
        try:
            return self.read_bytes(MAX_NAME_BYTES).decode()
        except UnicodeDecodeError as error:
            raise damaged_file(self.file, f"a name in it is not UTF-8 ({error})") from None

    def read_value(self, key: str, value_type: int) -> Any:
        if value_type == ARRAY:
            return self.read_array(key)
        if value_type == STRING:
            return decode_text(self.read_bytes(HEADER_LIMIT))
        if value_type not in NUMBERS:
            raise damaged_file(self.file, f"the value of {key!r} is of type {value_type}, which does not exist")
        value = self.read_number(NUMBERS[value_type])
        return self.as_bools(key, [value])[0] if value_type == BOOL else value

    def read_array(self, key: str) -> list[Any]:
        kind, length = self.read_number("I"), self.read_number("Q")
        if kind == ARRAY:
            raise UnsupportedModel(f"{key!r} in {self.file} is an array of arrays", "no known model needs one")
        if kind == STRING:
            self.check_count(length, 8, f"texts in {key!r}")
            return self.read_strings(length)
        if kind not in NUMBERS:
            raise damaged_file(self.file, f"the array {key!r} is of type {kind}, which does not exist")
        width = struct.calcsize(NUMBERS[kind])
        self.check_count(length, width, f"numbers in {key!r}")
        values = list(struct.unpack_from(f"<{length}{NUMBERS[kind]}", self.content, self.position))
        self.position += length * width
        return self.as_bools(key, values) if kind == BOOL else values

    def as_bools(self, key: str, values: list[int]) -> list[bool]:
        if not set(values) <= {0, 1}:
            raise damaged_file(self.file, f"{key!r} holds something else than true and false")
        return [value == 1 for value in values]

    def read_strings(self, length: int) -> list[str]:
        """`value` for each, without the calls: a vocabulary has hundreds of thousands."""
        content, at, end, found = self.content, self.position, self.end, []
        read = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if at + 8 > end or (until := at + 8 + read(content, at)[0]) > end:
                self.position = at
                self.read_bytes(HEADER_LIMIT)  # raises with the place
                break
            found.append(content[at + 8 : until].decode(errors="replace"))
            at = until
        self.position = at
        return found

    def read_tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Name, format, shape and offset within the tensors' part of the file."""
        name = self.read_name()
        dimensions = self.read_number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise damaged_file(self.file, f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.read_number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.read_number("I"), self.read_number("Q")
        if kind not in BLOCK_TYPES:
            stated = UNSUPPORTED_TYPES.get(kind, f"type {kind}")
            raise UnsupportedModel(
                f"the tensor {name!r} in {self.file} is stored as {stated.upper()}",
                f"known are {', '.join(t.name.upper() for t in BLOCK_TYPES.values())}",
            )
        if 0 in shape:
            raise damaged_file(self.file, f"the tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % BLOCK_TYPES[kind].block_elements:
            raise damaged_file(
                self.file,
                f"a row of {name!r} has {shape[-1]} elements, which are no whole blocks of "
                f"{BLOCK_TYPES[kind].block_elements} in {BLOCK_TYPES[kind].name.upper()}",
            )
        return name, BLOCK_TYPES[kind].name, shape, offset

    def read_alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise damaged_file(self.file, f"its alignment is {value!r}, not a power of two from 8")
        return value

    def locate_tensors(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """The tensors by name, each within the file and apart from the others."""
        tensors: dict[str, GGUFTensor] = {}
        for name, form, shape, offset in entries:
            nbytes = math.prod(shape[:-1]) * BLOCK_TYPE_BY_NAME[form].row_bytes(shape[-1])
            if name in tensors:
                raise damaged_file(self.file, f"the tensor {name!r} stands in it twice")
            if offset % alignment:
                raise damaged_file(self.file, f"{name!r} lies at {offset}, which is no multiple of {alignment}")
            if start + offset + nbytes > self.size:
                missing = start + offset + nbytes - self.size
                raise damaged_file(
                    self.file, f"{name!r} of shape {list(shape)} ends {missing} bytes beyond its end"
                )
            tensors[name] = GGUFTensor(self.file, form, shape, start + offset, nbytes)
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise damaged_file(self.file, f"the tensor {name!r} overlaps another")
            end = tensor.offset + tensor.nbytes
        return tensors


def decode_text(raw: bytes) -> str:
    """Values may hold bytes that are no UTF-8, as pieces of words in old vocabularies do: nothing that is typed or
    shown can contain them, so each becomes U+FFFD and the model stays usable."""
    return raw.decode(errors="replace")

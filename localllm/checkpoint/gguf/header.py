"""The header of a GGUF model: its metadata and the locations of its tensors, in one or several files.

Reads no weights, needs no torch, and does not interpret keys. A file is parsed sequentially from its memory map.
Files are untrusted: every count and length is checked against the file before it is used, and the cost of a header
is limited. Source: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import ModelNotFound, UnsupportedModel
from localllm.files import damaged_file, refuse_lfs_pointer
from localllm.hub.gguf import MAGIC, missing_part, part_files
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME, BLOCK_TYPES, UNSUPPORTED_TYPES

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless general.alignment is given
MAX_ALIGNMENT = 2**20
MAX_NAME_BYTES = 2**16 - 1  # bytes; the specification's limit for keys
MAX_DIMENSIONS = 4
HEADER_LIMIT = 256 * 2**20  # bytes; the largest real ones, with 260,000 tokens and 500,000 merges, take 20 MB
MAX_ENTRIES = 2**21  # keys, tensors and elements of arrays together: 0.8 million in the largest real headers
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
MIN_TENSOR_BYTES = 32  # in the header: lengths, a name of one byte, one dimension, type, offset
MIN_KEY_BYTES = 14


@dataclass(frozen=True)
class GGUFTensor:
    file: Path
    format: str  # a name in quant/formats/gguf_types.py
    shape: tuple[int, ...]  # outermost first, as in torch
    offset: int  # bytes from the beginning of the file
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """`files`: the single file, or all parts of a split model; metadata: of the first part, as plain Python
    values.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def stored_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def read_gguf(path: Path) -> GGUFHeader:
    """Read the header of a file, or of all parts of a split model, given any of them.

    Raises ModelNotFound if a part is missing, UnsupportedModel for an unsupported version, byte order or tensor
    type, and DamagedModel for a truncated or inconsistent file.
    """
    files = model_parts(path)
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, file in enumerate(files):
        fields, part_tensors = read_part(file)
        check_part(file, fields, i, len(files))
        metadata = metadata or fields
        if duplicates := tensors.keys() & part_tensors.keys():
            raise damaged_file(file, f"the tensor {min(duplicates)!r} is also in an earlier part")
        tensors |= part_tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise damaged_file(path, f"its parts should contain {expected!r} tensors, but contain {len(tensors)}")
    return GGUFHeader(files, metadata, tensors)


def model_parts(path: Path) -> tuple[Path, ...]:
    """Return all parts of the model to which this file belongs."""
    if missing := missing_part(path):
        raise ModelNotFound(f"the file {missing} is missing", "fetch all parts of the model into one folder")
    files = tuple(part_files(path))
    if path not in files:
        raise damaged_file(path, "its part number exceeds the number of parts")
    return files


def check_part(file: Path, fields: Mapping[str, Any], index: int, count: int) -> None:
    """Raise DamagedModel if a part's metadata contradicts its name."""
    stated = fields.get("split.no", 0), fields.get("split.count", 0) or 1
    if stated != (index, count):
        named = f"part {index + 1} of {count}" if count > 1 else "a whole model"
        raise damaged_file(file, f"its name says {named}, its metadata split {stated[0]} of {stated[1]}")


def read_part(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Read metadata and tensors of one file."""
    with file.open("rb") as stream:
        begin = stream.read(24)
        refuse_lfs_pointer(file, begin)
        if begin[:4] != MAGIC:
            raise damaged_file(file, f"it begins with {begin[:4]!r}, not with GGUF")
        if len(begin) < 24:
            raise damaged_file(file, "it ends within its first 24 bytes")
        version = int.from_bytes(begin[4:8], "little")
        if version.to_bytes(4, "big")[:2] != b"\0\0":
            raise UnsupportedModel(f"{file} is big endian", "fetch the little-endian version of this model")
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{file} is GGUF version {version}", "versions 2 and 3 are supported: fetch a newer file"
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return HeaderReader(file, content).read()


class HeaderReader:
    """A position in the header that only moves forward. Every read is checked against the end."""

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
                raise damaged_file(self.file, f"the key {key!r} occurs twice")
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
            where = "the file" if self.end == self.size else f"the limit of {HEADER_LIMIT} bytes for headers"
            raise damaged_file(
                self.file, f"at byte {self.position}, {count} more bytes are needed, beyond the end of {where}"
            )

    def check_count(self, number: int, min_bytes: int, what: str) -> None:
        """Raise DamagedModel for a count that the rest of the file cannot hold, or that would cost too much to
        read.
        """
        self.require_bytes(number * min_bytes)
        self.entry_count += number
        if self.entry_count > MAX_ENTRIES:
            raise damaged_file(self.file, f"it has {number} {what}, more than any real header")

    def read_bytes(self, limit: int) -> bytes:
        length = self.read_number("Q")
        if length > limit:
            raise damaged_file(self.file, f"at byte {self.position - 8}, a name should have {length} bytes")
        self.require_bytes(length)
        text = self.content[self.position : self.position + length]
        self.position += length
        return text

    def read_name(self) -> str:
        """Read the name of a key or tensor, strictly in UTF-8, because names decide what is read."""
        try:
            return self.read_bytes(MAX_NAME_BYTES).decode()
        except UnicodeDecodeError as error:
            raise damaged_file(self.file, f"a name is not UTF-8 ({error})") from None

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
        element_type, length = self.read_number("I"), self.read_number("Q")
        if element_type == ARRAY:
            raise UnsupportedModel(f"{key!r} in {self.file} is an array of arrays", "no known model needs one")
        if element_type == STRING:
            self.check_count(length, 8, f"strings in {key!r}")
            return self.read_strings(length)
        if element_type not in NUMBERS:
            raise damaged_file(self.file, f"the array {key!r} is of type {element_type}, which does not exist")
        width = struct.calcsize(NUMBERS[element_type])
        self.check_count(length, width, f"numbers in {key!r}")
        values = list(struct.unpack_from(f"<{length}{NUMBERS[element_type]}", self.content, self.position))
        self.position += length * width
        return self.as_bools(key, values) if element_type == BOOL else values

    def as_bools(self, key: str, values: list[int]) -> list[bool]:
        if not set(values) <= {0, 1}:
            raise damaged_file(self.file, f"{key!r} contains other values than true and false")
        return [value == 1 for value in values]

    def read_strings(self, length: int) -> list[str]:
        """Read strings like `read_value`, without its calls: a vocabulary has hundreds of thousands."""
        content, position, end, strings = self.content, self.position, self.end, []
        read = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if position + 8 > end or (stop := position + 8 + read(content, position)[0]) > end:
                self.position = position
                self.read_bytes(HEADER_LIMIT)  # raises an error with the position
                break
            strings.append(content[position + 8 : stop].decode(errors="replace"))
            position = stop
        self.position = position
        return strings

    def read_tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, format, shape and offset within the tensor data."""
        name = self.read_name()
        dimensions = self.read_number("I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise damaged_file(self.file, f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.read_number("Q") for _ in range(dimensions))[::-1]
        block_type, offset = self.read_number("I"), self.read_number("Q")
        if block_type not in BLOCK_TYPES:
            type_name = UNSUPPORTED_TYPES.get(block_type, f"type {block_type}")
            raise UnsupportedModel(
                f"the tensor {name!r} in {self.file} is stored as {type_name.upper()}",
                f"these are supported: {', '.join(t.name.upper() for t in BLOCK_TYPES.values())}",
            )
        if 0 in shape:
            raise damaged_file(self.file, f"the tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % BLOCK_TYPES[block_type].block_elements:
            raise damaged_file(
                self.file,
                f"a row of {name!r} has {shape[-1]} elements, not a multiple of the "
                f"{BLOCK_TYPES[block_type].block_elements} in a block of {BLOCK_TYPES[block_type].name.upper()}",
            )
        return name, BLOCK_TYPES[block_type].name, shape, offset

    def read_alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise damaged_file(self.file, f"its alignment is {value!r}, not a power of two >= 8")
        return value

    def locate_tensors(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """Return the tensors by name, after checking that each is within the file and none overlap."""
        tensors: dict[str, GGUFTensor] = {}
        for name, block_format, shape, offset in entries:
            nbytes = math.prod(shape[:-1]) * BLOCK_TYPE_BY_NAME[block_format].row_bytes(shape[-1])
            if name in tensors:
                raise damaged_file(self.file, f"the tensor {name!r} occurs twice")
            if offset % alignment:
                raise damaged_file(self.file, f"the offset of {name!r} is {offset}, not a multiple of {alignment}")
            if start + offset + nbytes > self.size:
                missing = start + offset + nbytes - self.size
                raise damaged_file(
                    self.file, f"{name!r} of shape {list(shape)} ends {missing} bytes beyond the end of the file"
                )
            tensors[name] = GGUFTensor(self.file, block_format, shape, start + offset, nbytes)
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise damaged_file(self.file, f"the tensor {name!r} overlaps another")
            end = tensor.offset + tensor.nbytes
        return tensors


def decode_text(raw: bytes) -> str:
    """Decode a value, replacing bytes that are not UTF-8 by U+FFFD.

    Old vocabularies contain such pieces of words. No text that is typed or shown can contain them, so the model
    stays usable.
    """
    return raw.decode(errors="replace")

"""The header of a GGUF model: its metadata and the locations of its tensors, in one or several files.

Reads no weights, needs no torch, and does not interpret keys.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.checkpoint.gguf.cursor import GGUFTensor, HeaderReader
from localllm.errors import ModelNotFound, UnsupportedModel
from localllm.files import damaged_file, refuse_lfs_pointer
from localllm.hub.gguf import MAGIC, missing_part, part_files

VERSIONS = (2, 3)


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

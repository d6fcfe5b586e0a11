"""The header of a GGUF model: its metadata and where its tensors lie, in one file or in parts.

Reads no weight and needs no torch. Knows nothing of families and of what a key means.
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
    """`files` are the one file, or all parts of a split one; metadata is plain Python, that of the first part."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def stored_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def read_gguf(path: Path) -> GGUFHeader:
    """The header of a file; of a split model any part stands for all.

    Raises ModelNotFound where a part is missing, UnsupportedModel for a version, byte order or tensor type that
    does not run, DamagedModel for a file that is truncated or contradicts itself.
    """
    files = model_parts(path)
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, file in enumerate(files):
        fields, found = read_part(file)
        check_part(file, fields, i, len(files))
        metadata = metadata or fields
        if twice := tensors.keys() & found.keys():
            raise damaged_file(file, f"it holds the tensor {min(twice)!r}, as an earlier part does")
        tensors |= found
    expected = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise damaged_file(path, f"its parts should hold {expected!r} tensors and hold {len(tensors)}")
    return GGUFHeader(files, metadata, tensors)


def model_parts(path: Path) -> tuple[Path, ...]:
    """All parts of the model that this file is of."""
    if missing := missing_part(path):
        raise ModelNotFound(f"the file {missing} is missing", "fetch all parts of the model into one folder")
    files = tuple(part_files(path))
    if path not in files:
        raise damaged_file(path, "its name says that it is a part beyond the last")
    return files


def check_part(file: Path, fields: Mapping[str, Any], index: int, count: int) -> None:
    """Raises DamagedModel where a part says of itself something else than its name does."""
    stated = fields.get("split.no", 0), fields.get("split.count", 0) or 1
    if stated != (index, count):
        named = f"part {index + 1} of {count}" if count > 1 else "a whole model"
        raise damaged_file(file, f"by its name it is {named}, by its metadata split {stated[0]} of {stated[1]}")


def read_part(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of one file."""
    with file.open("rb") as stream:
        begin = stream.read(24)
        refuse_lfs_pointer(file, begin)
        if begin[:4] != MAGIC:
            raise damaged_file(file, f"it begins with {begin[:4]!r}, not with GGUF")
        if len(begin) < 24:
            raise damaged_file(file, "it ends within its first 24 bytes")
        version = int.from_bytes(begin[4:8], "little")
        if version.to_bytes(4, "big")[:2] != b"\0\0":
            raise UnsupportedModel(f"{file} is big endian", "fetch the little-endian edition of this model")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{file} is GGUF version {version}", "versions 2 and 3 run: fetch it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return HeaderReader(file, content).read()

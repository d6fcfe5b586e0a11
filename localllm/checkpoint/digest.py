"""Digests that tell a model from another without reading gigabytes at every run.

A small file is hashed whole, here and now. Of a large one the SHA-256 is known where it came from the Hub, which
names contents by it (`localllm verify` proves that), and samples are hashed: its size, its begin, where
headers are, and slices all over it. Another model, a fine-tune or a cut file shows in them; a flipped bit may not.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from localllm.files import TOKENIZER_FILES
from localllm.hub.folder import COMPANION_FILES, TEMPLATES_FOLDER, weight_files
from localllm.hub.gguf import is_gguf, part_files
from localllm.hub.store import SHA256

SMALL_FILE_BYTES = 32 * 2**20  # bytes that are hashed whole: 20 to 100 ms
HEAD_BYTES = 2**20  # bytes at the begin of a large file
SLICE_COUNT, SLICE_BYTES = (
    256,
    4096,
)  # taken at even distances: a megabyte, from the cache of the system after a run


@dataclass(frozen=True)
class FileDigest:
    """One file of a model."""

    path: str  # in the model's folder
    size: int  # bytes
    sha256: str | None  # of all of it; None of a large file that is not from the Hub
    samples: str | None  # SHA-256 of size, begin and slices; None of a small file

    @property
    def affects_logits(self) -> bool:
        """Do the numbers of an answer depend on it, besides its texts?"""
        return self.path == "config.json" or self.path.endswith((".safetensors", ".gguf"))

    @property
    def label(self) -> str:
        return f"sha256 {self.sha256}" if self.sha256 else f"samples {self.samples}"

    def matches(self, other: "FileDigest") -> bool:
        """By all that is known of both."""
        both = [(a, b) for a, b in ((self.sha256, other.sha256), (self.samples, other.samples)) if a and b]
        return self.size == other.size and bool(both) and all(a == b for a, b in both)


def digest_model(model: Path) -> tuple[FileDigest, ...]:
    """Of the files that a folder's model is made of, or of all parts of a GGUF file. Raises as `weight_files`."""
    if is_gguf(model):
        return tuple(digest_file(part, model.parent) for part in part_files(model))
    templates = (file.relative_to(model).as_posix() for file in sorted((model / TEMPLATES_FOLDER).glob("*.jinja")))
    tokenizer = next((name for name in TOKENIZER_FILES if (model / name).is_file()), TOKENIZER_FILES[0])
    names = [
        *(name for name in COMPANION_FILES if name != "README.md"),
        tokenizer,
        *templates,
        *weight_files(model),
    ]
    return tuple(digest_file(model / name, model) for name in names if (model / name).is_file())


def digest_file(file: Path, folder: Path) -> FileDigest:
    name, size = file.relative_to(folder).as_posix(), file.stat().st_size
    if size <= SMALL_FILE_BYTES:
        return FileDigest(name, size, hashlib.sha256(file.read_bytes()).hexdigest(), None)
    blob = file.readlink().name if file.is_symlink() else ""
    return FileDigest(name, size, blob if SHA256.fullmatch(blob) else None, hash_samples(file, size))


def hash_samples(file: Path, size: int) -> str:
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        found.update(stream.read(HEAD_BYTES))
        for number in range(SLICE_COUNT):
            stream.seek((size - SLICE_BYTES) * number // (SLICE_COUNT - 1))
            found.update(stream.read(SLICE_BYTES))
    return found.hexdigest()


def combine_digests(files: tuple[FileDigest, ...]) -> tuple[str, str]:
    """One hash over all files, and of which kind it is: `sha256` where that of every file is known, else
    `samples`."""
    kind = "sha256" if all(file.sha256 for file in files) else "samples"
    lines = (f"{file.path} {file.size} {getattr(file, kind) or file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest(), kind

"""Digests that identify a model without reading gigabytes at every run.

A small file is hashed entirely. The SHA-256 of a large file is known if it came from the Hub, which names contents
by it (`localllm verify` checks it); in addition, samples are hashed: its size, its beginning, where headers are,
and slices throughout. Another model, a fine-tune or a truncated file differs in these; a flipped bit may not.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from localllm.files import TOKENIZER_FILES
from localllm.hub.gguf import is_gguf, part_files
from localllm.hub.hf_cache import SHA256
from localllm.hub.model_files import COMPANION_FILES, TEMPLATES_FOLDER, weight_files

SMALL_FILE_BYTES = 32 * 2**20  # largest size that is hashed entirely, in 20 to 100 ms
HEAD_BYTES = 2**20  # hashed at the beginning of a large file
SLICE_COUNT, SLICE_BYTES = 256, 4096  # at even distances: a megabyte in total, in the system's cache after a run


@dataclass(frozen=True)
class FileDigest:
    """The digest of one file of a model."""

    path: str  # relative to the model's folder
    size: int  # bytes
    sha256: str | None  # of the entire file; None for a large file that is not from the Hub
    samples: str | None  # SHA-256 of size, beginning and slices; None for a small file

    @property
    def affects_logits(self) -> bool:
        """Whether the file affects the logits, rather than only text processing."""
        return self.path == "config.json" or self.path.endswith((".safetensors", ".gguf"))

    @property
    def label(self) -> str:
        return f"sha256 {self.sha256}" if self.sha256 else f"samples {self.samples}"

    def matches(self, other: "FileDigest") -> bool:
        """Return whether all digests that both have are equal, and at least one is."""
        both = [(a, b) for a, b in ((self.sha256, other.sha256), (self.samples, other.samples)) if a and b]
        return self.size == other.size and bool(both) and all(a == b for a, b in both)


def digest_model(model: Path) -> tuple[FileDigest, ...]:
    """Return the digests of a folder's model files, or of all parts of a GGUF file. Raises the errors of
    `weight_files`."""
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
    """Return the digest of a file in a model's folder."""
    name, size = file.relative_to(folder).as_posix(), file.stat().st_size
    if size <= SMALL_FILE_BYTES:
        return FileDigest(name, size, hashlib.sha256(file.read_bytes()).hexdigest(), None)
    blob = file.readlink().name if file.is_symlink() else ""
    return FileDigest(name, size, blob if SHA256.fullmatch(blob) else None, hash_samples(file, size))


def hash_samples(file: Path, size: int) -> str:
    """Return the SHA-256 of size, beginning and slices."""
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
        for index in range(SLICE_COUNT):
            stream.seek((size - SLICE_BYTES) * index // (SLICE_COUNT - 1))
            digest.update(stream.read(SLICE_BYTES))
    return digest.hexdigest()


def combine_digests(files: tuple[FileDigest, ...]) -> tuple[str, str]:
    """Return one hash over all files and its type: `sha256` if known for all files, otherwise `samples`."""
    digest_type = "sha256" if all(file.sha256 for file in files) else "samples"
    lines = (f"{file.path} {file.size} {getattr(file, digest_type) or file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest(), digest_type

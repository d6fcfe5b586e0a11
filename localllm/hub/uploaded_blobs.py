"""Files uploaded by clients (`/api/blobs`), stored by SHA-256 in LOCALLLM_HOME/blobs, and the model folders made
of them in LOCALLLM_HOME/models, whose files are hard links to the blobs.

A blob is only stored after its digest has been verified.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from localllm.errors import DiskFull, UsageError, WrongDigest
from localllm.files import explain_disk_errors
from localllm.formatting import format_bytes
from localllm.hub.hf_cache import nearest_existing
from localllm.hub.local_names import edition_files, find_edition
from localllm.settings import Settings

DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
QUANTIZED_UPLOAD = re.compile(r"[0-9a-f]{64}@")  # names that `quantize.store` gives to quantized uploads
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
SPARE_BYTES = 64 * 2**20  # of the disk remain free
DISK_CHECK_BYTES = 64 * 2**20  # between two checks of the free space
MAX_FILES = 1000


def parse_digest(digest: str) -> str:
    """Return the hexadecimal digits of `sha256:...`. Raises UsageError for any other format."""
    if not (match := DIGEST.fullmatch(digest)):
        raise UsageError("invalid digest format", "send sha256: and 64 hexadecimal digits")
    return match[1]


def blob_file(digest: str) -> Path:
    """Return the path of a blob, whether it exists or not. Raises UsageError like `parse_digest`."""
    return home_folder("blobs") / f"sha256-{parse_digest(digest)}"


class BlobUpload:
    """A blob being written; leaving its `with` block deletes it unless it was finished."""

    def __init__(self, digest: str, expected_bytes: int | None = None):
        """expected_bytes: the size, if known. Raises UsageError for an invalid digest, DiskFull."""
        self.digest = parse_digest(digest)
        self.blob = blob_file(digest)
        self.hasher = hashlib.sha256()
        self.bytes_since_check = 0
        self.check_disk(expected_bytes or 0)
        with explain_disk_errors(self.blob.parent):
            self.blob.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.blob.parent, prefix=".")
            self.path, self.file = Path(name), os.fdopen(handle, "wb")

    def write(self, content: bytes) -> None:
        """Append bytes. Raises DiskFull."""
        self.hasher.update(content)
        self.bytes_since_check += len(content)
        if self.bytes_since_check > DISK_CHECK_BYTES:
            self.check_disk(0)
            self.bytes_since_check = 0
        with explain_disk_errors(self.blob.parent):
            self.file.write(content)

    def finish(self) -> None:
        """Store the complete blob. Raises WrongDigest if its content has another digest."""
        if self.hasher.hexdigest() != self.digest:
            expected, got = f"sha256:{self.digest}", f"sha256:{self.hasher.hexdigest()}"
            raise WrongDigest(f'digest mismatch, expected "{expected}", got "{got}"')
        with explain_disk_errors(self.blob.parent):
            self.file.flush()
            self.path.replace(self.blob)

    def check_disk(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(nearest_existing(self.blob.parent)).free
        if needed_bytes + SPARE_BYTES > free:
            raise DiskFull(
                f"the disk has {format_bytes(free)} free, of which {format_bytes(SPARE_BYTES)} are reserved",
                "free some space",
            )

    def __enter__(self) -> "BlobUpload":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


def link_model_folder(files: Mapping[str, str]) -> Path:
    """Make a folder in which each file name is a link to the blob with its digest, and return its path.

    Raises UsageError for an invalid file name, or a blob that was not uploaded.
    """
    if not 0 < len(files) <= MAX_FILES:
        raise UsageError(f"the request has {len(files)} files", f"send 1 to {MAX_FILES}")
    for name, digest in files.items():
        if not FILE_NAME.fullmatch(name):
            raise UsageError(f"{name[:80]!r} is not a valid file name", "use letters, digits, '.', '_' and '-'")
        if not blob_file(digest).is_file():
            raise UsageError(f'blob "{digest}" of {name} was not uploaded', "send it to /api/blobs first")
    manifest = "".join(f"{name} {parse_digest(digest)}\n" for name, digest in sorted(files.items()))
    folder = home_folder("models") / hashlib.sha256(manifest.encode()).hexdigest()
    with explain_disk_errors(folder.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, digest in files.items():
            if not (folder / name).exists():
                os.link(blob_file(digest), folder / name)
    return folder


def remove_unused_uploads(source: str) -> None:
    """Remove the upload folder that contains `source`, and its blobs, unless an edition uses it. The folder may
    also contain weights quantized from an upload."""
    folder = next(filter(is_upload_folder, (Path(source), *Path(source).parents)), None)
    if folder is None or not folder.is_dir():
        return
    editions = (find_edition(name) for name in edition_files())
    if any(edition and Path(edition.source).is_relative_to(folder) for edition in editions):
        return
    with explain_disk_errors(folder):
        inodes = {file.stat().st_ino for file in folder.iterdir()}
        shutil.rmtree(folder)
        for blob in home_folder("blobs").glob("sha256-*"):
            if (entry := blob.stat()).st_ino in inodes and entry.st_nlink == 1:
                blob.unlink()


def is_upload_folder(folder: Path) -> bool:
    """Whether `link_model_folder` made the folder, or its weights were quantized from such a folder."""
    return folder.parent == home_folder("models") or (
        folder.parent.parent == home_folder("quantized") and bool(QUANTIZED_UPLOAD.match(folder.parent.name))
    )


def home_folder(name: str) -> Path:
    return Settings.from_environment().home / name

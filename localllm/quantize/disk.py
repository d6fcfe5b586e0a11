"""Atomic writes: files that are on the disk before they become visible. No torch."""

import os
import shutil
from pathlib import Path

from localllm.errors import DiskFull
from localllm.formatting import format_bytes

DRAFT_SUFFIX = ".draft"  # suffix of a file that is being written


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise DiskFull if the disk for `folder` has fewer than `needed` bytes free."""
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing_folder).free
    if free < needed:
        raise DiskFull(
            f"{folder} will take about {format_bytes(needed)}, but the disk has {format_bytes(free)} left",
            "free space, or name a folder on another disk",
        )


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically; once this returns, it survives a power failure."""
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    draft.write_bytes(content)
    publish_draft(draft, path)


def publish_draft(draft: Path, path: Path) -> None:
    """Rename a complete draft to its final name."""
    fsync_path(draft)
    os.replace(draft, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

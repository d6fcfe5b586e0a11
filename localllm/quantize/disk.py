"""Files that are on the disk before anybody sees them. No torch."""

import os
import shutil
from pathlib import Path

from localllm.errors import DiskFull
from localllm.formatting import format_bytes

DRAFT_SUFFIX = ".draft"  # ends the name of a file that is being written


def check_disk_space(folder: Path, needed: int) -> None:
    """Raises DiskFull where the disk that is to hold `folder` has fewer than `needed` bytes."""
    here = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(here).free
    if free < needed:
        raise DiskFull(
            f"{folder} will take about {format_bytes(needed)} and the disk has {format_bytes(free)} left",
            "make room, or name a folder on another disk",
        )


def write_durably(path: Path, content: bytes) -> None:
    """The whole file or none; once this returns, a power cut leaves it whole."""
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    draft.write_bytes(content)
    publish_draft(draft, path)


def publish_draft(draft: Path, path: Path) -> None:
    """Give a file that is written its name."""
    fsync_path(draft)
    os.replace(draft, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The cache of Hugging Face as a place: where it is and why there, what it takes, what is unfinished.

Knows nothing of what the models in it are.
"""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from localllm.hub.partial import PARTIAL_SUFFIX

# The variables that place the cache, the first that is set having its way, as huggingface_hub reads them.
CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
UNFINISHED_SUFFIXES = (
    PARTIAL_SUFFIX,
    ".incomplete",
)  # files that a download of ours, and of huggingface_hub, leaves behind


@dataclass(frozen=True)
class CacheState:
    path: Path
    because: str  # the variable that places it there, or `default`
    exists: bool
    writable: bool
    models: int
    model_bytes: int
    unfinished: int
    unfinished_bytes: int  # on the disk: what is missing of such a file is a hole in it
    free_bytes: int  # of the disk it is on, or will be


def cache_state(environment: Mapping[str, str] = os.environ) -> CacheState:
    """What there is, without the network. Folders that may not be read count as empty."""
    path = Path(constants.HF_HUB_CACHE)
    folders = list(path.glob("models--*"))
    files = [file for folder in folders for file in _files(folder)]
    unfinished = [file for name, file in files if name.endswith(UNFINISHED_SUFFIXES)]
    models = [file for name, file in files if not name.endswith(UNFINISHED_SUFFIXES)]
    return CacheState(
        path=path,
        because=next((name for name in CACHE_VARIABLES if environment.get(name)), "default"),
        exists=path.is_dir(),
        writable=is_writable(path),
        models=len(folders),
        model_bytes=sum(file.st_size for file in models),
        unfinished=len(unfinished),
        unfinished_bytes=sum(512 * file.st_blocks for file in unfinished),
        free_bytes=shutil.disk_usage(nearest_existing(path)).free,
    )


def is_writable(folder: Path) -> bool:
    """May files be made in the folder, or may the folder be made?"""
    nearest = nearest_existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _files(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Files by name, those that are links to them left out: a snapshot's name what lies beside it."""
    found = [(name, os.lstat(Path(where) / name)) for where, _, names in os.walk(folder) for name in names]
    return [(name, file) for name, file in found if stat.S_ISREG(file.st_mode)]

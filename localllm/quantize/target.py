"""Where an artefact may be written: what is there and must not be lost. No torch."""

import shutil
from pathlib import Path

from localllm.errors import UsageError
from localllm.quantize.source import RECIPE_FILE

LOCK_FILE = ".lock"


def check_target(folder: Path, *, force: bool) -> None:
    """Raises UsageError where something is at this place that an artefact must not replace, or for a place that
    has no name of its own."""
    if folder.name in ("", ".."):
        raise UsageError(f"{folder} is no name for a new folder", "name one, as in -o DIR")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / RECIPE_FILE).is_file():
        raise UsageError(f"{folder} is there and no model that localllm quantized", "name another folder")
    if not force:
        raise UsageError(f"{folder} is there", "name another folder, or add --force to replace it")


def clear_partial(partial: Path) -> None:
    """Empties a folder that is being written, but for its lock and what says that it is ours. Shards go before
    what is said of them: those that are left, whenever this ends, are whole."""
    for file in sorted(partial.iterdir(), key=Path.is_dir):
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in (LOCK_FILE, RECIPE_FILE):
            file.unlink()

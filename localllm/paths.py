"""Paths as people write them."""

from pathlib import Path

from localllm.errors import UsageError


def expand_path(path: str) -> Path:
    """With a home folder in place of its `~`. Raises UsageError where nobody knows which that is."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = path.split("/", 1)[0]
        raise UsageError(f"nobody knows which folder {home} of {path} is", "write the whole path") from error

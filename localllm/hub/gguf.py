"""GGUF models as files: one, or parts with the names that llama.cpp gives them."""

import re
from collections.abc import Iterator
from pathlib import Path

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAGIC = b"GGUF"
SENSES = ("mmproj",)  # files of this name hold what sees and hears, beside the model


def is_gguf(path: Path) -> bool:
    """By its first bytes: Ollama keeps its models under names without a suffix. A file of that suffix that begins
    otherwise is a damaged one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def parts(path: Path) -> Iterator[Path]:
    """All files of the model that this file is of, here or not. Their count is a stranger's: stop at the first
    that is missing."""
    named = PART.fullmatch(path.name)
    if not named:
        yield path
        return
    stem, _, count = named.groups()
    for number in range(1, int(count) + 1):
        yield path.with_name(f"{stem}-{number:05}-of-{count}.gguf")


def missing_part(path: Path) -> Path | None:
    return next((part for part in parts(path) if not part.is_file()), None)


def model_name(path: Path) -> str:
    named = PART.fullmatch(path.name)
    return named[1] if named else path.stem


def models_in(folder: Path) -> list[Path]:
    """One file of each GGUF model in a folder."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith(SENSES))
    return list({model_name(file): file for file in reversed(files)}.values())[::-1]

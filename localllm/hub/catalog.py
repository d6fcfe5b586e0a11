"""The curated names of `models.toml`: what to call a model, and what is known of it before it is here.

Knows nothing of what lies on this machine.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class CatalogEntry:
    """One name. Either `boxed` (it comes with the program) or `repo` (it is on huggingface.co) is given."""

    name: str
    license: str
    boxed: str | None = None  # a folder of localllm/boxed
    repo: str | None = None
    parameters: str | None = None  # as the model card says it: "1.23B"
    context: int | None = None  # tokens


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """All entries by name, in the order of the file."""
    # The wheel carries the file inside the package; a source tree has it beside the package.
    file = next(p for p in (PACKAGE / "models.toml", PACKAGE.parent / "models.toml") if p.exists())
    models = tomllib.loads(file.read_text(encoding="utf-8"))["models"]
    return {name: CatalogEntry(name=name, **fields) for name, fields in models.items()}


def boxed_folder(entry: CatalogEntry) -> Path | None:
    """Where the model that comes with the program lies; None for a model of the Hub."""
    return PACKAGE / "boxed" / entry.boxed if entry.boxed else None

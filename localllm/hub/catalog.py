"""The curated names of `models.toml`: what to call a model, and what is known of it before it is here.

Knows nothing of what lies on this machine.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True)
class CatalogEntry:
    """One model. Either `boxed` (it comes with the program) or `repo` (it is on huggingface.co) is given.

    The head of models.toml says what the fields mean; None is what was not found out.
    """

    name: str
    about: str
    license: str | None = None
    aliases: tuple[str, ...] = ()  # second names
    boxed: str | None = None  # a folder of localllm/boxed
    repo: str | None = None
    revision: str = "main"
    quant: str | None = None  # which files of a GGUF repository: "Q4_K_M"
    parameters: str | None = None  # of the part that reads text: "1.23B"
    active: str | None = None  # of those that one token meets, where they are fewer: "3.35B"
    context: int | None = None  # tokens
    bytes: int | None = None  # of the download, in two digits
    gated: bool = False  # known to ask for consent to its terms
    recommended: str | None = None  # "bf16", "int8", "int4", "mxfp4"; None where it is GGUF


@functools.cache
def catalog_entries() -> tuple[CatalogEntry, ...]:
    """All entries, in the order of the file."""
    # The wheel carries the file inside the package; a source tree has it beside the package.
    file = next(p for p in (PACKAGE_FOLDER / "models.toml", PACKAGE_FOLDER.parent / "models.toml") if p.exists())
    models = tomllib.loads(file.read_text(encoding="utf-8"))["models"]
    return tuple(
        CatalogEntry(name=name, aliases=tuple(fields.pop("aliases", ())), **fields)
        for name, fields in models.items()
    )


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """The entry of every name, second names too."""
    named = [(name, entry) for entry in catalog_entries() for name in (entry.name, *entry.aliases)]
    assert len(dict(named)) == len(named), "models.toml names two models alike"
    return dict(named)


def boxed_folder(entry: CatalogEntry) -> Path | None:
    """Where the model that comes with the program lies; None for a model of the Hub."""
    return PACKAGE_FOLDER / "boxed" / entry.boxed if entry.boxed else None

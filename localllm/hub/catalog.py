"""The curated models of `models.toml`: their names, and what is known of each before it is downloaded."""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True)
class CatalogEntry:
    """A model, with either `boxed` (bundled with localllm) or `repo` (on huggingface.co).

    The head of models.toml documents the fields; None means unknown.
    """

    name: str
    about: str
    license: str | None = None
    aliases: tuple[str, ...] = ()  # alternative names
    boxed: str | None = None  # a folder in localllm/boxed
    repo: str | None = None
    original: str | None = None  # the gated repository of which `repo` is an ungated copy
    revision: str = "main"
    quant: str | None = None  # selects a model of a GGUF repository: "Q4_K_M"
    parameters: str | None = None  # of the text model: "1.23B"
    active: str | None = None  # parameters per token, if fewer: "3.35B"
    context: int | None = None  # tokens
    bytes: int | None = None  # approximate download size
    gated: bool = False  # requires accepting terms on the Hub
    embeds: bool = False  # an embedding model, without chat
    recommended: str | None = None  # "bf16", "int8", "int4", "mxfp4"; None for GGUF


@functools.cache
def catalog_entries() -> tuple[CatalogEntry, ...]:
    """Return all entries, in the order of the file."""
    # In a wheel the file is inside the package, in a source tree next to it.
    file = next(p for p in (PACKAGE_FOLDER / "models.toml", PACKAGE_FOLDER.parent / "models.toml") if p.exists())
    models = tomllib.loads(file.read_text(encoding="utf-8"))["models"]
    return tuple(
        CatalogEntry(name=name, aliases=tuple(fields.pop("aliases", ())), **fields)
        for name, fields in models.items()
    )


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Return the entry for each name and alias."""
    named = [(name, entry) for entry in catalog_entries() for name in (entry.name, *entry.aliases)]
    assert len(dict(named)) == len(named), "models.toml has a duplicate name"
    return dict(named)


# Tags that Ollama appends to a size and that models.toml omits: they refer to the same model.
TRAINING_WORDS = re.compile(r"-(?:instruct|chat|it)(?:-qat)?(?=-|$)|-(?:2507|0414)(?=-|$)")
FORMAT_SUFFIX = re.compile(r"-((?:ud-)?(?:i?q\d(?:_[a-z0-9]+)*|tq\d_\d|mxfp4|bf16|fp16|f16|f32))$")
MAX_NAME_CHARS = 200  # including the tag
SIXTEEN_BITS = ("bf16", "fp16", "f16")


def find_entry(name: str) -> CatalogEntry | None:
    """Return the entry for a name in any of Ollama's spellings: any case, `qwen3:4b-instruct-2507-q4_K_M`,
    `gemma3:4b-it-qat`, `qwen3:8b-fp16`.

    For a quantization that the catalogue does not list (`qwen3:8b-q6_K`), the entry is returned with that
    quantization, although the repository may lack it. Returns None if no entry matches.
    """
    name = name.lower() if len(name) <= MAX_NAME_CHARS else ""
    for spelling in dict.fromkeys([name, *_without_training_words(name)]):
        if entry := catalog().get(spelling):
            return entry
        if not (suffix := FORMAT_SUFFIX.search(spelling)):
            continue
        plain = catalog().get(spelling[: suffix.start()])
        if suffix[1] in SIXTEEN_BITS:
            published = catalog().get(f"{spelling[: suffix.start()]}-bf16")
            if published or (plain and plain.repo and not plain.quant):
                return published or plain
        elif plain and plain.quant:
            return replace(plain, name=spelling, aliases=(), quant=suffix[1].upper(), bytes=None)
    return None


def _without_training_words(name: str) -> Iterator[str]:
    """Yield the name without each of the words, then without all of them."""
    for word in TRAINING_WORDS.finditer(name):
        yield name[: word.start()] + name[word.end() :]
    yield TRAINING_WORDS.sub("", name)


def ungated_name(repo: str) -> str | None:
    """Return the name of an ungated copy of a gated repository, if there is one."""
    return next((entry.name for entry in catalog_entries() if entry.original == repo), None)


def describe_edition(name: str) -> str | None:
    """Return a line that states which quantization a plain name selects, or None if there is only one."""
    entry = find_entry(name)
    published = catalog().get(f"{entry.name}-bf16") if entry else None
    if entry is None or published is None:
        return None
    return f"{entry.name} is {entry.repo} in {entry.quant}; {published.name} is the model as published"


def bundled_folder(entry: CatalogEntry) -> Path | None:
    """Return the folder of the bundled model, or None for a model on the Hub."""
    return PACKAGE_FOLDER / "boxed" / entry.boxed if entry.boxed else None

"""The curated models of `models.toml`: their names, and what is known of each before it is downloaded."""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
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
    purpose: str | None = None  # "code", "translation", "moderation"; None for conversation
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
TRAINING_WORDS = re.compile(r"-(?:instruct|chat|it)(?:-qat)?(?=-|$)|-(?:2507|0414)(?=-|$)|-a\d+b(?=-)")
TRAINED_IN_4_BITS = "-qat"
FORMAT_SUFFIX = re.compile(r"-((?:ud-)?(?:i?q\d(?:_[a-z0-9]+)*|tq\d_\d|mxfp4|bf16|fp16|f16|f32))$")
FORMAT_OR_BITS = re.compile(rf"{FORMAT_SUFFIX.pattern}|-int[48]$")
MAX_NAME_CHARS = 200  # including the tag
MAX_TRAINING_WORDS = 4
SIXTEEN_BITS = ("bf16", "fp16", "f16")
FOUR_BITS, EIGHT_BITS = ("Q4_K_M", "UD-Q4_K_M"), "Q8_0"


def find_entry(name: str) -> CatalogEntry | None:
    """Return the entry for a name in any of Ollama's spellings: any case, `qwen3:4b-instruct-2507-q4_K_M`,
    `gemma3:4b-it-qat`, `qwen3:8b-fp16`.

    For a quantization that the catalogue does not list (`qwen3:8b-q6_K`), the entry is returned with that
    quantization, although the repository may lack it. Returns None if no entry matches.
    """
    match = _match(name)
    return match[1] if match else None


def catalog_spelling(name: str) -> str | None:
    """Return a name that `find_entry` finds as models.toml spells it, with its format if it states one."""
    match = _match(name)
    return match[0] if match else None


def _match(name: str) -> tuple[str, CatalogEntry] | None:
    name = name.lower() if len(name) <= MAX_NAME_CHARS else ""
    for spelling in dict.fromkeys([name, *_without_training_words(name)]):
        in_4_bits = f"{spelling}-q4_k_m" if TRAINED_IN_4_BITS in name else spelling
        for known in (in_4_bits, spelling):
            if entry := catalog().get(known):
                return known, entry
        if not (suffix := FORMAT_SUFFIX.search(spelling)):
            continue
        plain_name = spelling[: suffix.start()]
        plain = catalog().get(plain_name)
        if suffix[1] in SIXTEEN_BITS:
            if published := catalog().get(f"{plain_name}-bf16") or (published_entry(plain) if plain else None):
                return published.name, published
            if plain and plain.repo and not plain.quant:
                return plain_name, plain
        elif plain and plain.quant:
            # `qwen3:4b` is a later model than `qwen3:4b-q4_k_m`, whose other formats have its name.
            base = catalog().get(f"{plain_name}-q4_k_m", plain)
            return spelling, replace(base, name=spelling, aliases=(), quant=suffix[1].upper(), bytes=None)
        elif plain:  # `olmo-3:7b-instruct-q4_K_M`: with fewer words it would be another model
            return None
    return None


def _without_training_words(name: str) -> Iterator[str]:
    """Yield the name without one of the words, then without two, and so on; nothing for a name with too many."""
    words = list(TRAINING_WORDS.finditer(name))
    if len(words) > MAX_TRAINING_WORDS:
        return
    for count in range(1, len(words) + 1):
        for removed in combinations(words, count):
            spelling = name
            for word in reversed(removed):
                spelling = spelling[: word.start()] + spelling[word.end() :]
            yield spelling


def leaves_format_open(name: str, entry: CatalogEntry) -> bool:
    """Whether a name states no format, so that the machine may choose among the entry's editions."""
    return entry.quant in FOUR_BITS and not FORMAT_OR_BITS.search(name.lower())


def published_entry(entry: CatalogEntry) -> CatalogEntry | None:
    """Return the entry of the model as published, of which the given entry is a quantization."""
    return catalog().get(f"{entry.name}-bf16")


def editions_of(entry: CatalogEntry) -> tuple[CatalogEntry, ...]:
    """Return the editions of a 4-bit entry in ascending order of bits: itself, Q8_0, and the model as published if
    it is known. The repository may lack Q8_0."""
    name = f"{entry.name}-q8_0"
    eight_bits = catalog().get(name) or replace(entry, name=name, aliases=(), quant=EIGHT_BITS, bytes=None)
    published = published_entry(entry)
    return (entry, eight_bits, published) if published else (entry, eight_bits)


def ungated_name(repo: str) -> str | None:
    """Return the name of an ungated copy of a gated repository, if there is one."""
    return next((entry.name for entry in catalog_entries() if entry.original == repo), None)


def bundled_folder(entry: CatalogEntry) -> Path | None:
    """Return the folder of the bundled model, or None for a model on the Hub."""
    return PACKAGE_FOLDER / "boxed" / entry.boxed if entry.boxed else None

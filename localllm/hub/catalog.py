"""The curated names of `models.toml`: what to call a model, and what is known of it before it is here.

Knows nothing of what lies on this machine.
"""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    original: str | None = None  # the gated repository that `repo` is an ungated edition of
    revision: str = "main"
    quant: str | None = None  # which files of a GGUF repository: "Q4_K_M"
    parameters: str | None = None  # of the part that reads text: "1.23B"
    active: str | None = None  # of those that one token meets, where they are fewer: "3.35B"
    context: int | None = None  # tokens
    bytes: int | None = None  # of the download, about
    gated: bool = False  # known to ask for consent to its terms
    embeds: bool = False  # gives vectors of texts and does not chat
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


# What Ollama writes behind a size, and the editions here leave out: the answer to it is the same model.
TRAINING_WORDS = re.compile(r"-(?:instruct|chat|it)(?:-qat)?(?=-|$)|-(?:2507|0414)(?=-|$)")
FORMAT_SUFFIX = re.compile(r"-((?:ud-)?(?:i?q\d(?:_[a-z0-9]+)*|tq\d_\d|mxfp4|bf16|fp16|f16|f32))$")
MAX_NAME_CHARS = 200  # of a name and its tag
SIXTEEN_BITS = ("bf16", "fp16", "f16")


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of a name in any of Ollama's spellings: any case, `qwen3:4b-instruct-2507-q4_K_M`,
    `gemma3:4b-it-qat`, `qwen3:8b-fp16`.

    A format of a GGUF repository that the catalogue does not list (`qwen3:8b-q6_K`) gives the entry with that
    format: only the Hub knows whether the repository has it. None where no entry is meant.
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
    """The name without one of the words, and without all of them, those closest to what was written first."""
    for word in TRAINING_WORDS.finditer(name):
        yield name[: word.start()] + name[word.end() :]
    yield TRAINING_WORDS.sub("", name)


def ungated_name(repo: str) -> str | None:
    """A name for an edition of a gated repository that asks for no login."""
    return next((entry.name for entry in catalog_entries() if entry.original == repo), None)


def describe_edition(name: str) -> str | None:
    """One line that says which edition a plain name stands for, and of what; None where there is only one."""
    entry = find_entry(name)
    published = catalog().get(f"{entry.name}-bf16") if entry else None
    if entry is None or published is None:
        return None
    return f"{entry.name} is {entry.repo} in {entry.quant}; {published.name} is the model as published"


def boxed_folder(entry: CatalogEntry) -> Path | None:
    """Where the model that comes with the program lies; None for a model of the Hub."""
    return PACKAGE_FOLDER / "boxed" / entry.boxed if entry.boxed else None

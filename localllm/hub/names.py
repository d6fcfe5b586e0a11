"""The names of models that a user may give, and what they refer to.

demo, qwen3:0.6b            a name of models.toml, in any case and with Ollama's tags (`-instruct-q4_K_M`)
Qwen/Qwen3-0.6B             a repository on the Hub, optionally with the prefix `hf.co/`
org/repo@v1.0               a branch, tag or commit of a repository
org/repo:Q4_K_M             one model of a repository of GGUF files
https://huggingface.co/...  the URL of a repository, a revision or a file, as copied from a browser
./folder, ./x.gguf          a path; a plain name that is not an alias may also be a path

A local name (`local_names.py`) refers to the source of its edition or alias. The tag `:latest` is ignored, as
Ollama's clients append it to every name.

Parsing a name only checks whether a path exists; it reads neither the model nor the network.
"""

import difflib
import os.path
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from localllm.errors import ModelNotFound
from localllm.files import expand_path
from localllm.hub.catalog import CatalogEntry, catalog, catalog_spelling, find_entry, leaves_format_open
from localllm.hub.local_names import edition_files, find_edition, read_aliases

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
ALIAS_NAME = re.compile(rf"{WORD}(:{WORD})?")
REVISION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,4}"
FILE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}(?:/[A-Za-z0-9][A-Za-z0-9._+-]{0,254})?"
INVALID_REPO = r"(?![^@:]*(?:--|\.\.|[.-]/|(?:[.-]|\.git)(?:[@:]|$)))"  # rejected by huggingface_hub
REPO = re.compile(rf"{INVALID_REPO}(?P<repo>{WORD}/{WORD})(?:@(?P<revision>{REVISION}))?(?::(?P<quant>{FILE}))?")
HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
HUB_PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree/([^/]+)|(?:blob|resolve)/([^/]+)/(.+))")
DEFAULT_REVISION = "main"
LATEST_TAG = ":latest"


@dataclass(frozen=True)
class RepoName:
    """A revision of a repository on the Hub, or one model of a repository of GGUF files."""

    repo: str
    revision: str = DEFAULT_REVISION
    quant: str | None = None  # Q4_K_M, or a file name
    # The entry of a catalogue name without a format. The name refers to any edition that is on this machine,
    # otherwise to the one that `llm.edition_choice` chooses. The other fields are those of the 4-bit edition.
    entry: CatalogEntry | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.quant}" if self.quant else "")


def repo_of_entry(entry: CatalogEntry, name: str | None = None) -> RepoName | None:
    """Return the repository of a catalogue entry, or None for the bundled model.

    name: by which the entry was found, if not its own; a format in it determines the edition.
    """
    if entry.repo is None:
        return None
    is_open = leaves_format_open(name or entry.name, entry)
    return RepoName(entry.repo, entry.revision, entry.quant, entry if is_open else None)


def parse_name(name: str, *, paths: bool = True) -> RepoName | CatalogEntry | Path:
    """Return what a name refers to; a catalogue entry is returned only for the bundled model.

    paths: accept paths; if False, the file system is not accessed, and only an alias can resolve to a path.
    Raises ModelNotFound for an invalid name, or for an unknown one, suggesting similar names.
    """
    if paths and is_path(name):
        return expand_path(name)
    name = strip_latest(name)
    if edition := find_edition(name):
        return _parse_target(edition.source)
    target = read_aliases().get(name)
    if target is None and name.startswith("/"):
        _raise_not_found(name)
    return _parse_target(target or name)


def strip_latest(name: str) -> str:
    """Remove the tag `:latest`, unless a name includes it, and spell a catalogue name as models.toml does."""
    plain = name.removesuffix(LATEST_TAG)
    spelling = None if name in catalog() else catalog_spelling(plain)
    if name == plain and spelling is None:
        return name
    local_names = {*read_aliases(), *edition_files()}
    if name in local_names or name in catalog():
        return name
    return plain if spelling is None or plain in local_names or is_path(plain) else spelling


def _parse_target(name: str) -> RepoName | CatalogEntry | Path:
    if name.startswith("/"):  # the target of an alias
        return Path(name)
    if entry := find_entry(name):
        return repo_of_entry(entry, name) or entry
    if match := REPO.fullmatch(_parse_url(name) if HUB_URL.match(name) else name):
        if ".." in (match["revision"] or ""):  # git does not allow such a name either
            _raise_not_found(name)
        return RepoName(match["repo"], match["revision"] or DEFAULT_REVISION, match["quant"])
    _raise_not_found(name)


def _parse_url(url: str) -> str:
    """Return ORG/REPO@REVISION:FILE for a URL of the Hub; a file other than GGUF refers to its repository."""
    path = re.split("[?#]", HUB_URL.sub("", url, count=1))[0].rstrip("/")
    if not (page := HUB_PAGE.fullmatch(path)):
        return path
    file = unquote(page[4] or "")
    return f"{page[1]}@{unquote(page[2] or page[3])}" + (f":{file}" if file.endswith(".gguf") else "")


def is_path(name: str) -> bool:
    """Whether the name is a path. A colon or a single slash is not sufficient: `qwen3:4b`, `org/repo`."""
    if name in catalog() or name in read_aliases() or name in edition_files() or HUB_URL.match(name):
        return False
    return (
        name in (".", "..")
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith("/")
        or os.path.exists(name)  # unlike Path.exists, False for a name that is too long or contains NUL
        or (name.endswith((".gguf", ".safetensors")) and ":" not in name)
        or (name.count("/") > 1 and not REPO.fullmatch(name))
    )


def similar_names(name: str) -> list[str]:
    """Up to four known names that resemble this one, the most similar first."""
    known = [*catalog(), *read_aliases(), *edition_files()]
    tagged = [other for other in known if other.startswith(f"{name}:")]
    return (tagged + [other for other in difflib.get_close_matches(name, known, n=4) if other not in tagged])[:4]


def _raise_not_found(name: str) -> NoReturn:
    if not ALIAS_NAME.fullmatch(name):
        raise ModelNotFound(
            f"{name!r} is not a model name",
            "give a name of `localllm list --all`, ORG/REPO or the path of a folder",
        )
    similar = similar_names(name)
    suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
    raise ModelNotFound(f"no model is called {name}", f"{suggestion}`localllm list --all` shows the names")

"""What a user calls a model, and what that stands for.

demo, qwen3:0.6b          an alias of models.toml, in any case and as Ollama spells tags (`-instruct-q4_K_M`)
Qwen/Qwen3-0.6B           a repository of the Hub; `hf.co/` may stand before it
org/repo@v1.0             a branch, a tag or a commit of it
org/repo:Q4_K_M           one model of a repository of GGUF files
https://huggingface.co/...  the address of a repository, of a revision or of a file of it, as a browser has it
./folder, ./x.gguf        a path; a plain name that is no alias may be one, too

An edition that a person made (`made.py`) is called as its maker said, and stands for what it was made from. As for
Ollama's clients, `:latest` behind a name says nothing.

Looks at no more of the disk than whether there is such a path.
"""

import difflib
import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from localllm.errors import ModelNotFound
from localllm.files import expand_path
from localllm.hub.catalog import CatalogEntry, catalog, find_entry
from localllm.hub.local_names import edition_files, find_edition, read_aliases

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
ALIAS_NAME = re.compile(rf"{WORD}(:{WORD})?")
REVISION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,4}"
FILE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}(?:/[A-Za-z0-9][A-Za-z0-9._+-]{0,254})?"
NO_REPO = r"(?![^@:]*(?:--|\.\.|[.-]/|(?:[.-]|\.git)(?:[@:]|$)))"  # huggingface_hub refuses them
REPO = re.compile(rf"{NO_REPO}(?P<repo>{WORD}/{WORD})(?:@(?P<revision>{REVISION}))?(?::(?P<quant>{FILE}))?")
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
HUB_PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree/([^/]+)|(?:blob|resolve)/([^/]+)/(.+))")
DEFAULT_REVISION = "main"
LATEST_TAG = ":latest"


@dataclass(frozen=True)
class RepoName:
    """A revision of a repository on the Hub; of a repository of GGUF files, one model."""

    repo: str
    revision: str = DEFAULT_REVISION
    quant: str | None = None  # Q4_K_M, or the name of a file

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.quant}" if self.quant else "")


def repo_of_entry(entry: CatalogEntry) -> RepoName | None:
    """None for the model that comes with the program."""
    return RepoName(entry.repo, entry.revision, entry.quant) if entry.repo else None


def parse_name(name: str, *, paths: bool = True) -> RepoName | CatalogEntry | Path:
    """What a name stands for; a catalogue entry only where the model comes with the program.

    paths: whether it may be one. If not, the disk is not looked at, and only an alias leads to a path.
    Raises ModelNotFound for what is no name, or one that nobody knows (with near names).
    """
    if paths and is_path(name):
        return expand_path(name)
    name = strip_latest(name)
    if edition := find_edition(name):
        return _parse_known(edition.source)
    known = read_aliases().get(name)
    if known is None and name.startswith("/"):
        _raise_not_found(name)
    return _parse_known(known or name)


def strip_latest(name: str) -> str:
    """Without `:latest`, unless there is a name with it; a name of the catalogue in its own spelling."""
    plain = name.removesuffix(LATEST_TAG)
    entry = None if name in catalog() else find_entry(plain)
    if name == plain and entry is None:
        return name
    own = {*read_aliases(), *edition_files()}
    if name in own or name in catalog():
        return name
    if entry is None or plain in own or is_path(plain):
        return plain
    return plain.lower() if plain.lower() in catalog() else entry.name


def _parse_known(name: str) -> RepoName | CatalogEntry | Path:
    if name.startswith("/"):  # where an alias leads
        return Path(name)
    if entry := find_entry(name):
        return repo_of_entry(entry) or entry
    if named := REPO.fullmatch(_parse_address(name) if HUB_ADDRESS.match(name) else name):
        if ".." in (named["revision"] or ""):  # git knows no such name either
            _raise_not_found(name)
        return RepoName(named["repo"], named["revision"] or DEFAULT_REVISION, named["quant"])
    _raise_not_found(name)


def _parse_address(address: str) -> str:
    """ORG/REPO@REVISION:FILE of an address at the Hub; a file that is not GGUF stands for its repository."""
    path = re.split("[?#]", HUB_ADDRESS.sub("", address, count=1))[0].rstrip("/")
    if not (page := HUB_PAGE.fullmatch(path)):
        return path
    file = unquote(page[4] or "")
    return f"{page[1]}@{unquote(page[2] or page[3])}" + (f":{file}" if file.endswith(".gguf") else "")


def is_path(name: str) -> bool:
    """Is this meant as a path? A colon or a slash alone does not make one: `qwen3:4b`, `org/repo`."""
    if name in catalog() or name in read_aliases() or name in edition_files() or HUB_ADDRESS.match(name):
        return False
    return (
        name in (".", "..")
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith("/")
        or os.path.exists(name)  # unlike Path.exists, False for a name too long or with a NUL
        or (name.endswith((".gguf", ".safetensors")) and ":" not in name)
        or (name.count("/") > 1 and not REPO.fullmatch(name))
    )


def similar_names(name: str) -> list[str]:
    """Names of models that could have been meant, likeliest first."""
    known = [*catalog(), *read_aliases(), *edition_files()]
    tags = [other for other in known if other.startswith(f"{name}:")]
    return (tags + [near for near in difflib.get_close_matches(name, known, n=4) if near not in tags])[:4]


def _raise_not_found(name: str) -> NoReturn:
    if not ALIAS_NAME.fullmatch(name):
        raise ModelNotFound(
            f"{name!r} is not a name of a model",
            "give a name of `localllm list --all`, ORG/REPO or the path of a folder",
        )
    near = similar_names(name)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(f"no model is called {name}", f"{guess}`localllm list --all` shows the names")

"""What a user calls a model, and what that stands for.

demo, qwen3:0.6b          an alias of models.toml
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
from localllm.hub.aliases import aliases
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.hub.made import edition_of, made_files
from localllm.paths import expanded

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
ALIAS = re.compile(rf"{WORD}(:{WORD})?")
REVISION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,4}"
FILE = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}(?:/[A-Za-z0-9][A-Za-z0-9._+-]{0,254})?"
NO_REPO = r"(?![^@:]*(?:--|\.\.|[.-]/|(?:[.-]|\.git)(?:[@:]|$)))"  # huggingface_hub refuses them
REPO = re.compile(rf"{NO_REPO}(?P<repo>{WORD}/{WORD})(?:@(?P<revision>{REVISION}))?(?::(?P<quant>{FILE}))?")
HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree/([^/]+)|(?:blob|resolve)/([^/]+)/(.+))")
MAIN = "main"
LATEST = ":latest"


@dataclass(frozen=True)
class RepoName:
    """A revision of a repository on the Hub; of a repository of GGUF files, one model."""

    repo: str
    revision: str = MAIN
    quant: str | None = None  # Q4_K_M, or the name of a file

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.quant}" if self.quant else "")


def repo_of(entry: CatalogEntry) -> RepoName | None:
    """None for the model that comes with the program."""
    return RepoName(entry.repo, entry.revision, entry.quant) if entry.repo else None


def parse(name: str, *, paths: bool = True) -> RepoName | CatalogEntry | Path:
    """What a name stands for; a catalogue entry only where the model comes with the program.

    paths: whether it may be one. If not, the disk is not looked at, and only an alias leads to a path.
    Raises ModelNotFound for what is no name, or one that nobody knows (with near names).
    """
    if paths and is_path(name):
        return expanded(name)
    name = known_as(name)
    if edition := edition_of(name):
        return _known(edition.source)
    known = aliases().get(name)
    if known is None and name.startswith("/"):
        _not_found(name)
    return _known(known or name)


def known_as(name: str) -> str:
    """Without `:latest`, unless there is a name with it."""
    plain = name.removesuffix(LATEST)
    return name if plain == name or name in aliases() or name in catalog() else plain


def _known(name: str) -> RepoName | CatalogEntry | Path:
    if name.startswith("/"):  # where an alias leads
        return Path(name)
    if entry := catalog().get(name):
        return repo_of(entry) or entry
    if named := REPO.fullmatch(_of_address(name) if HUB.match(name) else name):
        if ".." in (named["revision"] or ""):  # git knows no such name either
            _not_found(name)
        return RepoName(named["repo"], named["revision"] or MAIN, named["quant"])
    _not_found(name)


def _of_address(address: str) -> str:
    """ORG/REPO@REVISION:FILE of an address at the Hub; a file that is not GGUF stands for its repository."""
    path = re.split("[?#]", HUB.sub("", address, count=1))[0].rstrip("/")
    if not (page := PAGE.fullmatch(path)):
        return path
    file = unquote(page[4] or "")
    return f"{page[1]}@{unquote(page[2] or page[3])}" + (f":{file}" if file.endswith(".gguf") else "")


def is_path(name: str) -> bool:
    """Is this meant as a path? A colon or a slash alone does not make one: `qwen3:4b`, `org/repo`."""
    if name in catalog() or name in aliases() or name in made_files() or HUB.match(name):
        return False
    return (
        name in (".", "..")
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith("/")
        or os.path.exists(name)  # unlike Path.exists, False for a name too long or with a NUL
        or (name.endswith((".gguf", ".safetensors")) and ":" not in name)
        or (name.count("/") > 1 and not REPO.fullmatch(name))
    )


def near_names(name: str) -> list[str]:
    """Names of models that could have been meant, likeliest first."""
    known = [*catalog(), *aliases(), *made_files()]
    if name.lower() in known:
        return [name.lower()]
    tags = [other for other in known if other.startswith(f"{name}:")]
    return (tags + [near for near in difflib.get_close_matches(name, known, n=4) if near not in tags])[:4]


def _not_found(name: str) -> NoReturn:
    if not ALIAS.fullmatch(name):
        raise ModelNotFound(
            f"{name!r} is not a name of a model",
            "give a name of `localllm list --all`, ORG/REPO or the path of a folder",
        )
    near = near_names(name)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(f"no model is called {name}", f"{guess}`localllm list --all` shows the names")

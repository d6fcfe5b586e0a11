"""The answers of huggingface.co to `huggingface_hub`, without a socket.

They were compared with published answers of the real one. Not supported: xet, datasets, spaces, uploads.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

LARGE = (".safetensors", ".gguf", ".bin", ".pt", "tokenizer.json")  # files with names that end so are LFS files
PAGE = 1000  # entries of a listing, as at the Hub
BYTES = re.compile(r"bytes=(\d*)-(\d*)")


class End(Enum):
    """State of the connection after the body."""

    KEEP = auto()
    CLOSE = auto()
    RESET = auto()
    STALL = auto()  # open and silent, until one of the two ends closes it


@dataclass(frozen=True)
class Reply:
    status: int  # 0: not even that is said
    headers: Mapping[str, str]
    body: bytes = b""
    offset: int = 0  # of the body in the file
    file: bytes = b""  # of which the body is a part
    end: End = End.KEEP

    @classmethod
    def of(
        cls, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> "Reply":
        return cls(status, {**(headers or {}), "Content-Length": str(len(body))}, body, **fields)

    @classmethod
    def json(cls, facts: object, headers: Mapping[str, str] | None = None, status: int = 200) -> "Reply":
        return cls.of(status, json.dumps(facts).encode(), {**(headers or {}), "Content-Type": "application/json"})

    @classmethod
    def refusal(cls, status: int, code: str | None = None, message: str | None = None, **headers: str) -> "Reply":
        named = {"X-Error-Code": code, "X-Error-Message": message}
        named = {name: value for name, value in named.items() if value}
        return cls.json({"error": message or code or f"status {status}"}, headers | named, status)


@dataclass(frozen=True)
class File:
    body: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return sha256(self.body).hexdigest()

    @cached_property
    def oid(self) -> str:
        """Hash of the git object: the file, or its LFS pointer."""
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.body)}\n"
        kept = text.encode() if self.lfs else self.body
        return sha1(b"blob %d\0" % len(kept) + kept).hexdigest()

    @property
    def etag(self) -> str:
        """Name of the blob in the cache of `huggingface_hub`."""
        return self.sha256 if self.lfs else self.oid

    def facts(self, oid: str, hash_name: str) -> dict[str, object]:
        """Fields of the file, which have other names in the model's description than in its tree."""
        lfs = {hash_name: self.sha256, "size": len(self.body), "pointerSize": 134}
        return {"size": len(self.body), oid: self.oid} | ({"lfs": lfs} if self.lfs else {})


@dataclass
class Repository:
    name: str
    gated: Literal[False, "auto", "manual"] = False
    private: bool = False
    readers: frozenset[str] = frozenset()  # tokens; nobody is asked where it is neither gated nor private
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag to commit
    commits: dict[str, dict[str, File]] = field(default_factory=dict)


@dataclass
class Answers:
    """`large_files`: on another host, behind a relative redirect, or sent directly, like mirrors do."""

    url: str
    cdn: str
    large_files: Literal["cdn", "redirect", "direct"] = "cdn"
    repositories: dict[str, Repository] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)  # old name to new name

    def add(
        self,
        name: str,
        files: Path | Mapping[str, bytes],
        *,
        refs: Iterable[str] = ("main",),
        commit: str | None = None,
        large: tuple[str, ...] = LARGE,
        **access: object,
    ) -> str:
        """Add a commit as the newest of `refs`, and return its hash. `access`: gated, private, readers."""
        if isinstance(files, Path):
            found = (path for path in sorted(files.rglob("*")) if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        tree = {path: File(body, path.endswith(large)) for path, body in sorted(files.items())}
        commit = commit or sha1(repr([(path, file.oid) for path, file in tree.items()]).encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository(name))
        for fact, value in access.items():
            setattr(repository, fact, value)
        repository.commits[commit] = tree
        repository.refs |= dict.fromkeys(refs, commit)
        return commit

    def hub(self, target: str, headers: Mapping[str, str]) -> Reply:
        """Answer like huggingface.co; names of headers are in lower case."""
        path, _, query = target.partition("?")
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                asked = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                asked |= {key: values[-1] for key, values in parse_qs(query).items()}
                return self._of_a_repository(answer, target, headers, asked)
        return Reply.refusal(404, None, "Sorry, we can't find the page you are looking for.")

    def store(self, target: str, headers: Mapping[str, str]) -> Reply:
        """Answer like the host of large files."""
        trees = (tree for repository in self.repositories.values() for tree in repository.commits.values())
        files = (file for tree in trees for file in tree.values() if file.lfs)
        stored = next((file for file in files if urlsplit(target).path == f"/cdn/{file.sha256}"), None)
        return _part(stored, headers, {}) if stored else Reply.refusal(403, None, "AccessDenied")

    def _of_a_repository(
        self, answer: Callable[..., Reply], target: str, headers: Mapping[str, str], asked: dict[str, str]
    ) -> Reply:
        """Check access first, then the revision. Tokens that begin with hf_ are valid, all others are not."""
        name = asked["repo"]
        if name in self.moved:
            return Reply.of(307, headers={"Location": target.replace(name, self.moved[name], 1)})
        token = headers.get("authorization", "").removeprefix("Bearer ")
        known = token.startswith("hf_")
        repository = self.repositories.get(name)
        gated = repository is not None and repository.gated and answer in (Answers._resolve, Answers._small)
        if token and not known and not gated:
            return Reply.refusal(401, None, "Invalid credentials in Authorization header")
        if repository is None or (repository.private and token not in repository.readers):
            # huggingface.co gives no code with its 401; over plain HTTP the client would not understand that.
            if known:
                return Reply.refusal(404, "RepoNotFound", "Repository not found")
            return Reply.refusal(401, "RepoNotFound", "Invalid username or password.")
        if gated and token not in repository.readers:
            way = f"Visit https://huggingface.co/{name} to ask for access." if known else "Please log in."
            return Reply.refusal(
                403 if known else 401, "GatedRepo", f"Access to model {name} is restricted. {way}"
            )
        revision = asked.get("revision", "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return Reply.refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return answer(self, repository, commit, asked, headers)

    def _model(self, repository: Repository, commit: str, asked: Mapping[str, str], _: object) -> Reply:
        files = repository.commits[commit].items()
        siblings = [
            {"rfilename": path} | (file.facts("blobId", "sha256") if "blobs" in asked else {})
            for path, file in files
        ]
        named = {
            "id": repository.name,
            "modelId": repository.name,
            "sha": commit,
            "tags": [],
            "siblings": siblings,
        }
        return Reply.json(named | {"private": repository.private, "gated": repository.gated, "disabled": False})

    def _tree(self, repository: Repository, commit: str, asked: Mapping[str, str], _: object) -> Reply:
        files = repository.commits[commit]
        folders = {path[:cut] for path in files for cut, letter in enumerate(path) if letter == "/" and cut}
        entries = [
            *({"path": p, "type": "directory", "oid": sha1(p.encode()).hexdigest(), "size": 0} for p in folders),
            *({"path": path, "type": "file"} | file.facts("oid", "oid") for path, file in files.items()),
        ]
        within = asked["path"] + "/" if "path" in asked else ""
        deep = asked.get("recursive", "").lower() in ("true", "1")
        entries = [entry for entry in entries if entry["path"].startswith(within)]
        if not entries:
            return Reply.refusal(404, "EntryNotFound", f"{within} does not exist on {commit}")
        entries = [entry for entry in entries if deep or "/" not in entry["path"][len(within) :]]
        first = int(asked.get("cursor", 0))
        if first + PAGE >= len(entries):
            return Reply.json(entries[first:])
        names = {key: value for key, value in asked.items() if key not in ("repo", "revision", "path")}
        path = f"/api/models/{repository.name}/tree/{quote(asked['revision'], safe='')}/{quote(within[:-1])}"
        rest = f"{self.url}{path.rstrip('/')}?{urlencode(names | {'cursor': first + PAGE})}"
        return Reply.json(entries[first : first + PAGE], {"Link": f'<{rest}>; rel="next"'})

    def _resolve(
        self, repository: Repository, commit: str, asked: Mapping[str, str], headers: Mapping[str, str]
    ) -> Reply:
        path = asked["path"]
        file = repository.commits[commit].get(path)
        if file is None:
            return _no_entry(commit)
        facts = {
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
            "X-Linked-Size": str(len(file.body)),
            "X-Linked-ETag": f'"{file.etag}"',
        }
        if file.lfs and self.large_files == "direct":
            return _part(file, headers, facts)
        if file.lfs and self.large_files == "cdn":
            signed = urlencode({"Signature": "0a1b", "filename": path})
            return Reply.of(302, headers=facts | {"Location": f"{self.cdn}/cdn/{file.sha256}?{signed}"})
        location = f"/api/resolve-cache/models/{repository.name}/{quote(commit, safe='')}/{quote(path)}"
        return Reply.of(307, headers=facts | {"Location": f"{location}?etag={quote(file.etag)}"})

    def _small(
        self, repository: Repository, commit: str, asked: Mapping[str, str], headers: Mapping[str, str]
    ) -> Reply:
        file = repository.commits[commit].get(asked["path"])
        if file is None:
            return _no_entry(commit)
        facts = {"X-Repo-Commit": commit, "Content-Type": "text/plain; charset=utf-8"}
        if not file.lfs and "gzip" in headers.get("accept-encoding", ""):  # then the Hub does not heed a range
            packed = {"Content-Encoding": "gzip", "ETag": f'W/"{file.oid}"'}
            return Reply.of(200, gzip.compress(file.body), facts | packed)
        return _part(file, headers, facts)


def _no_entry(commit: str) -> Reply:
    return Reply.refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})


def _part(file: File, headers: Mapping[str, str], facts: Mapping[str, str]) -> Reply:
    """Reply with the file or the requested range."""
    etag, size = f'"{file.oid}"', len(file.body)  # of a large file a hash that the client cannot check
    facts = {**facts, "ETag": etag, "Accept-Ranges": "bytes"}
    asked = BYTES.fullmatch(headers.get("range", ""))
    if not asked or asked[0] == "bytes=-" or headers.get("if-range", etag) != etag:
        return Reply.of(200, file.body, facts, file=file.body)
    first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
    last = min(size - 1, int(asked[2])) if asked[1] and asked[2] else size - 1
    if first > last:
        return Reply.of(416, headers=facts | {"Content-Range": f"bytes */{size}"})
    facts |= {"Content-Range": f"bytes {first}-{last}/{size}"}
    return Reply.of(206, file.body[first : last + 1], facts, offset=first, file=file.body)


REPO = r"/(?P<repo>[^/]+/[^/]+)"
ROUTES = {
    rf"/api/models{REPO}(/revision/(?P<revision>[^/]+))?": Answers._model,
    rf"/api/models{REPO}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?": Answers._tree,
    rf"/api/resolve-cache/models{REPO}/(?P<revision>[^/]+)/(?P<path>.+)": Answers._small,
    rf"{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": Answers._resolve,
}

"""The Hugging Face cache as it lies on the disk: repositories, their snapshots, and the models in them.

It is where `huggingface_hub` keeps it (HF_HUB_CACHE, HF_HOME), used in place and never copied. Never the network.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from huggingface_hub import constants

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.files import read_json
from localllm.hub.gguf import choose_model, distinct_models, model_tags, models_in_snapshot, part_files
from localllm.hub.model_files import missing_files
from localllm.hub.names import DEFAULT_REVISION, RepoName
from localllm.hub.partial_file import PARTIAL_SUFFIX

SHA1, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")  # names of contents in `blobs`
REPO_FOLDER = "models--"  # how the cache of huggingface_hub names the folder of a repository
REVISION_LIMIT = 200  # bytes of a file in refs/: a commit has 40


def cache_root() -> Path:
    return Path(constants.HF_HUB_CACHE)


def repo_root(repo: str) -> Path:
    """Where the cache keeps a repository: with `blobs`, `snapshots` and `refs`; here or not."""
    return cache_root() / (REPO_FOLDER + repo.replace("/", "--"))


def blob_path(repo: str, digest: str) -> Path:
    """Where the content with this digest lies, or would."""
    return repo_root(repo) / "blobs" / digest


def digests_file(repo: str, commit: str) -> Path:
    """Where the digests of files are kept whose contents lie under their names: on file systems without links."""
    return repo_root(repo) / "digests" / f"{commit}.json"


def read_digests(repo: str, commit: str) -> dict[str, str]:
    """By path in the repository. Empty where none are kept, or something else is."""
    try:
        kept = read_json(digests_file(repo, commit))
    except DamagedModel:
        return {}
    return {path: digest for path, digest in kept.items() if isinstance(digest, str) and is_digest(digest)}


def is_digest(name: str) -> bool:
    return bool(SHA256.fullmatch(name) or SHA1.fullmatch(name))


def cached_commit(repo: str, revision: str = DEFAULT_REVISION) -> str | None:
    """The commit that a branch, a tag or a commit stood for when it was last asked; None if it is not here."""
    root = repo_root(repo)
    try:
        with (root / "refs" / revision).open(encoding="utf-8") as file:
            commit = file.read(REVISION_LIMIT).strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    known = {snapshot.name for snapshot in (root / "snapshots").glob("*")}
    return commit if commit in known else None


def cached_folder(repo: str, revision: str = DEFAULT_REVISION) -> Path | None:
    """The snapshot of a revision, complete or not; None if neither its config.json nor a GGUF file is here."""
    commit = cached_commit(repo, revision)
    snapshot = repo_root(repo) / "snapshots" / commit if commit else None
    return (
        snapshot if snapshot and ((snapshot / "config.json").is_file() or models_in_snapshot(snapshot)) else None
    )


def parse_snapshot_path(path: Path) -> tuple[str, str, PurePath] | None:
    """Repository, commit and the path from there of a snapshot in the cache, or of what lies in one; None for any
    other path."""
    absolute, root = path.absolute(), cache_root().absolute()
    inner = absolute.relative_to(root).parts if absolute.is_relative_to(root) else ()
    if len(inner) < 3 or inner[1] != "snapshots" or not inner[0].startswith(REPO_FOLDER):
        return None
    return inner[0].removeprefix(REPO_FOLDER).replace("--", "/", 1), inner[2], PurePath(*inner[3:])


def cached_models() -> Iterator[tuple[str, Path]]:
    """Name and folder of each complete language model in the cache; of GGUF models the file."""
    # The library can list them, too; importing it takes longer than all else that `list` does.
    folders = (folder.name.removeprefix(REPO_FOLDER) for folder in cache_root().glob(f"{REPO_FOLDER}*"))
    for repo in sorted((name.replace("--", "/", 1) for name in folders), key=str.lower):
        folder = cached_folder(repo)
        if folder and (files := models_in_snapshot(folder)):
            tags = model_tags([file.relative_to(folder) for file in files])
            for file, tag in zip(files, tags, strict=True):
                yield (repo if len(files) == 1 else str(RepoName(repo, quant=tag))), file
        elif folder and _is_whole_language_model(folder):
            yield repo, folder


def _is_whole_language_model(folder: Path) -> bool:
    """The cache also holds encoders, image models and downloads that were broken off."""
    try:
        config = read_json(folder / "config.json")
        stated = config.get("architectures")
        names = stated if isinstance(stated, list) else []
        reads_text = "text_config" in config or any(str(name).endswith("ForCausalLM") for name in names)
        return reads_text and not missing_files(folder)
    except (DamagedModel, UnsupportedModel):  # one broken repository must not hide the others
        return False


# The cache of Hugging Face as a place: where it is and why there, what it takes, what is unfinished.
#
# Knows nothing of what the models in it are.

# The variables that place the cache, the first that is set having its way, as huggingface_hub reads them.
CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
UNFINISHED_SUFFIXES = (
    PARTIAL_SUFFIX,
    ".incomplete",
)  # files that a download of ours, and of huggingface_hub, leaves behind


@dataclass(frozen=True)
class CacheState:
    path: Path
    because: str  # the variable that places it there, or `default`
    exists: bool
    writable: bool
    models: int
    model_bytes: int
    unfinished: int
    unfinished_bytes: int  # on the disk: what is missing of such a file is a hole in it
    free_bytes: int  # of the disk it is on, or will be


def cache_state(environment: Mapping[str, str] = os.environ) -> CacheState:
    """What there is, without the network. Folders that may not be read count as empty."""
    path = Path(constants.HF_HUB_CACHE)
    folders = list(path.glob("models--*"))
    files = [file for folder in folders for file in _files(folder)]
    unfinished = [file for name, file in files if name.endswith(UNFINISHED_SUFFIXES)]
    models = [file for name, file in files if not name.endswith(UNFINISHED_SUFFIXES)]
    return CacheState(
        path=path,
        because=next((name for name in CACHE_VARIABLES if environment.get(name)), "default"),
        exists=path.is_dir(),
        writable=is_writable(path),
        models=len(folders),
        model_bytes=sum(file.st_size for file in models),
        unfinished=len(unfinished),
        unfinished_bytes=sum(512 * file.st_blocks for file in unfinished),
        free_bytes=shutil.disk_usage(nearest_existing(path)).free,
    )


def is_writable(folder: Path) -> bool:
    """May files be made in the folder, or may the folder be made?"""
    nearest = nearest_existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _files(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Files by name, those that are links to them left out: a snapshot's name what lies beside it."""
    found = [(name, os.lstat(Path(where) / name)) for where, _, names in os.walk(folder) for name in names]
    return [(name, file) for name, file in found if stat.S_ISREG(file.st_mode)]


# What lies in the cache of one repository: in `snapshots` the files of each revision, as links to their contents
# in `blobs`, and what is left there of downloads that were broken off.


@dataclass(frozen=True)
class CachedFile:
    path: str  # in the repository
    link: Path  # in the snapshot
    blob: Path | None  # that it links to, here or not; None where it is a copy, or a link to somewhere else

    @property
    def content(self) -> Path:
        return self.blob or self.link

    @property
    def size(self) -> int:
        """Bytes; 0 where its content is not here."""
        return self.link.stat().st_size if self.link.is_file() else 0


@dataclass(frozen=True)
class CachedRepo:
    root: Path
    revisions: dict[str, list[CachedFile]]  # by commit
    refs: dict[str, str]  # branch or tag to commit
    unfinished: list[Path]  # downloads that were broken off, or are under way

    @classmethod
    def read(cls, root: Path) -> "CachedRepo":
        """Links that lead nowhere are among the files. Empty where there is no such folder."""
        refs, folders = root / "refs", sorted((root / "snapshots").glob("*"))
        return cls(
            root,
            {folder.name: snapshot_files(folder) for folder in folders},
            {ref.relative_to(refs).as_posix(): _commit(ref) for ref in sorted(refs.rglob("*")) if ref.is_file()},
            sorted(blob for blob in (root / "blobs").glob("*") if blob.name.endswith(UNFINISHED_SUFFIXES)),
        )

    def ref_name(self, commit: str) -> str:
        """A branch or tag that stands for a commit, else its hash."""
        return next((ref for ref, meant in self.refs.items() if meant == commit), commit)


def snapshot_files(snapshot: Path) -> list[CachedFile]:
    blobs = (snapshot.parent.parent / "blobs").resolve()
    names = sorted(Path(folder, file) for folder, _, files in os.walk(snapshot) for file in files)
    return [CachedFile(name.relative_to(snapshot).as_posix(), name, _blob(name, blobs)) for name in names]


def files_of_model(files: list[CachedFile], repo: RepoName) -> list[CachedFile]:
    """Those of the one GGUF model that is meant. Raises ModelNotFound as `choose`."""
    chosen = {str(part) for part in part_files(choose_model(gguf_models(files), repo.quant, repo.repo))}
    return [file for file in files if file.path in chosen]


def gguf_models(files: list[CachedFile]) -> list[PurePosixPath]:
    """One file of each, here or not."""
    return distinct_models(PurePosixPath(file.path) for file in files)


def _blob(name: Path, blobs: Path) -> Path | None:
    """The first step alone: a blob may itself be a link, to a content that several repositories share."""
    if not name.is_symlink():
        return None
    target = name.parent / name.readlink()
    return blobs / target.name if target.parent.resolve() == blobs else None


def _commit(ref: Path) -> str:
    with ref.open("rb") as file:
        return file.read(REVISION_LIMIT).decode(errors="replace").strip()

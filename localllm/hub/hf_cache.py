"""The Hugging Face cache on disk: repositories, their snapshots, the models in them, and the cache's state.

It is located as by `huggingface_hub` (HF_HUB_CACHE, HF_HOME), and models are used in place. No network access.
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

SHA1, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")  # names in `blobs`
REPO_FOLDER = "models--"  # prefix of a repository's folder
REVISION_LIMIT = 200  # bytes read of a file in refs/; a commit has 40
# The variables that determine the cache's path, in huggingface_hub's order of precedence.
CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
UNFINISHED_SUFFIXES = (PARTIAL_SUFFIX, ".incomplete")  # of downloads by localllm and huggingface_hub


def cache_root() -> Path:
    return Path(constants.HF_HUB_CACHE)


def repo_root(repo: str) -> Path:
    """Return the folder of a repository, which contains `blobs`, `snapshots` and `refs` if it exists."""
    return cache_root() / (REPO_FOLDER + repo.replace("/", "--"))


def blob_path(repo: str, digest: str) -> Path:
    """Return the path of the blob with this digest, whether it exists or not."""
    return repo_root(repo) / "blobs" / digest


def digests_file(repo: str, commit: str) -> Path:
    """Return the file with the digests of a snapshot on a file system without links, whose files are not blobs."""
    return repo_root(repo) / "digests" / f"{commit}.json"


def read_digests(repo: str, commit: str) -> dict[str, str]:
    """Return the recorded digests by path in the repository; empty if there are none or the file is damaged."""
    try:
        digests = read_json(digests_file(repo, commit))
    except DamagedModel:
        return {}
    return {path: digest for path, digest in digests.items() if isinstance(digest, str) and is_digest(digest)}


def is_digest(name: str) -> bool:
    return bool(SHA256.fullmatch(name) or SHA1.fullmatch(name))


def cached_commit(repo: str, revision: str = DEFAULT_REVISION) -> str | None:
    """Return the commit of a branch, tag or commit as of the last pull, or None if it has no snapshot."""
    root = repo_root(repo)
    try:
        with (root / "refs" / revision).open(encoding="utf-8") as file:
            commit = file.read(REVISION_LIMIT).strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    snapshots = {snapshot.name for snapshot in (root / "snapshots").glob("*")}
    return commit if commit in snapshots else None


def cached_folder(repo: str, revision: str = DEFAULT_REVISION) -> Path | None:
    """Return the snapshot of a revision, complete or not, or None if it has neither config.json nor a GGUF
    file."""
    commit = cached_commit(repo, revision)
    snapshot = repo_root(repo) / "snapshots" / commit if commit else None
    return (
        snapshot if snapshot and ((snapshot / "config.json").is_file() or models_in_snapshot(snapshot)) else None
    )


def parse_snapshot_path(path: Path) -> tuple[str, str, PurePath] | None:
    """Split the path of a snapshot, or of a file in it, into repository, commit and relative path; None for any
    other path."""
    absolute, root = path.absolute(), cache_root().absolute()
    inner = absolute.relative_to(root).parts if absolute.is_relative_to(root) else ()
    if len(inner) < 3 or inner[1] != "snapshots" or not inner[0].startswith(REPO_FOLDER):
        return None
    return inner[0].removeprefix(REPO_FOLDER).replace("--", "/", 1), inner[2], PurePath(*inner[3:])


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the name of each complete language model in the cache with its snapshot, or its GGUF file."""
    # huggingface_hub can scan the cache, too, but importing that takes longer than the rest of `list`.
    folders = (folder.name.removeprefix(REPO_FOLDER) for folder in cache_root().glob(f"{REPO_FOLDER}*"))
    for repo in sorted((name.replace("--", "/", 1) for name in folders), key=str.lower):
        folder = cached_folder(repo)
        if folder and (files := models_in_snapshot(folder)):
            tags = model_tags([file.relative_to(folder) for file in files])
            for file, tag in zip(files, tags, strict=True):
                yield (repo if len(files) == 1 else str(RepoName(repo, quant=tag))), file
        elif folder and _is_complete_language_model(folder):
            yield repo, folder


def _is_complete_language_model(folder: Path) -> bool:
    """Whether a snapshot can be run; the cache may also contain encoders, image models and aborted downloads."""
    try:
        config = read_json(folder / "config.json")
        architectures = config.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        is_language_model = "text_config" in config or any(str(name).endswith("ForCausalLM") for name in names)
        return is_language_model and not missing_files(folder)
    except (DamagedModel, UnsupportedModel):  # one damaged repository must not hide the others
        return False


@dataclass(frozen=True)
class CachedFile:
    """A file of a snapshot."""

    path: str  # relative to the repository
    link: Path  # in the snapshot
    blob: Path | None  # target of the link, existing or not; None for a copy, or a link to elsewhere

    @property
    def content(self) -> Path:
        return self.blob or self.link

    @property
    def size(self) -> int:
        """Size in bytes; 0 if the content is missing."""
        return self.link.stat().st_size if self.link.is_file() else 0


@dataclass(frozen=True)
class CachedRepo:
    """The snapshots, refs and unfinished downloads of a repository in the cache."""

    root: Path
    revisions: dict[str, list[CachedFile]]  # by commit
    refs: dict[str, str]  # branch or tag to commit
    unfinished: list[Path]  # aborted or running downloads

    @classmethod
    def read(cls, root: Path) -> "CachedRepo":
        """Scan the folder of a repository, including broken links; empty if there is no such folder."""
        refs, folders = root / "refs", sorted((root / "snapshots").glob("*"))
        return cls(
            root,
            {folder.name: snapshot_files(folder) for folder in folders},
            {ref.relative_to(refs).as_posix(): _commit(ref) for ref in sorted(refs.rglob("*")) if ref.is_file()},
            sorted(blob for blob in (root / "blobs").glob("*") if blob.name.endswith(UNFINISHED_SUFFIXES)),
        )

    def ref_name(self, commit: str) -> str:
        """Return a branch or tag of a commit, or the commit itself."""
        return next((ref for ref, target in self.refs.items() if target == commit), commit)


def snapshot_files(snapshot: Path) -> list[CachedFile]:
    """Return all files of a snapshot, including broken links."""
    blobs = (snapshot.parent.parent / "blobs").resolve()
    names = sorted(Path(folder, file) for folder, _, files in os.walk(snapshot) for file in files)
    return [CachedFile(name.relative_to(snapshot).as_posix(), name, _blob(name, blobs)) for name in names]


def files_of_model(files: list[CachedFile], repo: RepoName) -> list[CachedFile]:
    """Return the files of the GGUF model that `repo` selects. Raises ModelNotFound like `choose_model`."""
    parts = {str(part) for part in part_files(choose_model(gguf_models(files), repo.quant, repo.repo))}
    return [file for file in files if file.path in parts]


def gguf_models(files: list[CachedFile]) -> list[PurePosixPath]:
    """Return the first file of each GGUF model, whether it exists or not."""
    return distinct_models(PurePosixPath(file.path) for file in files)


def _blob(name: Path, blobs: Path) -> Path | None:
    """Follow one link only: a blob may itself be a link to content that several repositories share."""
    if not name.is_symlink():
        return None
    target = name.parent / name.readlink()
    return blobs / target.name if target.parent.resolve() == blobs else None


def _commit(ref: Path) -> str:
    with ref.open("rb") as file:
        return file.read(REVISION_LIMIT).decode(errors="replace").strip()


@dataclass(frozen=True)
class CacheState:
    """Location, size and unfinished downloads of the cache."""

    path: Path
    because: str  # the variable that determines the path, or `default`
    exists: bool
    writable: bool
    models: int
    model_bytes: int
    unfinished: int
    unfinished_bytes: int  # on disk; missing parts of a file are holes
    free_bytes: int  # of the disk that has the cache, or will have it


def cache_state(environment: Mapping[str, str] = os.environ) -> CacheState:
    """Scan the cache. Unreadable folders count as empty."""
    path = cache_root()
    folders = list(path.glob(f"{REPO_FOLDER}*"))
    files = [file for folder in folders for file in _regular_files(folder)]
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
    """Whether files can be created in the folder, which is created if necessary."""
    nearest = nearest_existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _regular_files(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Return names and stat results of the regular files; links only refer to files that are counted as well."""
    files = [(name, os.lstat(Path(parent) / name)) for parent, _, names in os.walk(folder) for name in names]
    return [(name, file) for name, file in files if stat.S_ISREG(file.st_mode)]

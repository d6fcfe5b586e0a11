"""What lies in the cache of one repository: in `snapshots` the files of each revision, as links to their contents
in `blobs`, and what is left there of downloads that were broken off."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localllm.hub.cache import UNFINISHED_SUFFIXES
from localllm.hub.gguf import choose_model, distinct_models, part_files
from localllm.hub.names import RepoName
from localllm.hub.store import REVISION_LIMIT


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

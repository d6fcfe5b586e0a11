"""The Hugging Face cache as it lies on the disk: repositories, their snapshots, and the models in them.

It is where `huggingface_hub` keeps it (HF_HUB_CACHE, HF_HOME), used in place and never copied. Never the network.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from huggingface_hub import constants

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.files import read_json
from localllm.hub.folder import missing_files
from localllm.hub.gguf import model_tags, models_in_snapshot
from localllm.hub.names import DEFAULT_REVISION, RepoName

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

"""Resolves the name of a model to its folder or GGUF file on this machine, without network access."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.hub.catalog import CatalogEntry, bundled_folder, catalog_entries, editions_of
from localllm.hub.gguf import choose_model, is_gguf, model_name, models_in_folder, models_in_snapshot
from localllm.hub.hf_cache import cached_folder, cached_models
from localllm.hub.local_names import edition_files, find_edition, read_aliases
from localllm.hub.model_files import INDEX_FILE, SINGLE_FILE, missing_files
from localllm.hub.names import RepoName, is_path, parse_name, repo_of_entry, strip_latest
from localllm.modelfile.edition import Edition


@dataclass(frozen=True)
class ModelRef:
    """A model on this machine. Names are resolved to it where they enter the program, and not passed further."""

    name: str
    path: Path  # the folder with config.json and weights, or a file of a GGUF model
    edition: Edition | None = None  # of the name

    @property
    def key(self) -> str:
        """Equal for all names of the same files."""
        return str(self.path.resolve())


def resolve_model(name: str, *, paths: bool = True) -> ModelRef:
    """Return the model with this name. paths: as in `parse_name`.

    Raises ModelNotFound if it is not on this machine (with similar names, or how to download it), UnsupportedModel
    if the path is a file other than GGUF.
    """
    located = locate_model(name, paths=paths)
    if isinstance(located, RepoName):
        return ModelRef(strip_latest(name), downloaded_path(located, name), find_edition(strip_latest(name)))
    return located


def locate_model(name: str, *, paths: bool = True) -> ModelRef | RepoName:
    """Return the model, or the repository to pull if it is missing or incomplete. Raises the errors of
    `resolve_model`."""
    plain = strip_latest(name)
    match parse_name(name, paths=paths):
        case RepoName() as repo:
            path = model_in_cache(repo)
            return repo if path is None or missing_files(path) else ModelRef(plain, path, find_edition(plain))
        case CatalogEntry() as entry:
            return ModelRef(plain, _bundled_model(entry), find_edition(plain))
        case Path() as path:
            ref = _resolve_path(path, name)
            return ref if paths and is_path(name) else ModelRef(plain, ref.path, find_edition(plain))


def downloaded_path(repo: RepoName, name: str) -> Path:
    """Return the model's folder in the cache, or its GGUF file.

    name: as the user wrote it, for the message. Raises ModelNotFound if the model is missing or incomplete.
    """
    path = model_in_cache(repo)
    missing = missing_files(path) if path else None
    if path and not missing:
        return path
    state = f"lacks {' and '.join(missing)}" if missing else "is not on this machine"
    raise ModelNotFound(f"{name} {state}", f"run `localllm pull {name}`")


def missing_repo(name: str) -> RepoName | None:
    """Return the repository to pull, or None if the model is on this machine and complete. Raises ModelNotFound as
    `parse_name` and `is_downloaded`."""
    repo = parse_name(name)
    return repo if isinstance(repo, RepoName) and not is_downloaded(repo) else None


def is_downloaded(repo: RepoName) -> bool:
    """Whether the model is in the cache and complete. Raises ModelNotFound if several cached models match."""
    path = model_in_cache(repo)
    return path is not None and not missing_files(path)


def edition_in_cache(repo: RepoName) -> RepoName:
    """Return the edition of a catalogue name without a format that is in the cache and complete: of several, the
    one with the fewest bits. Returns the repository itself if there is none, and for any other name.

    Raises ModelNotFound if several models match.
    """
    for edition in editions_of(repo.entry) if repo.entry else ():
        candidate = RepoName(edition.repo or repo.repo, edition.revision, edition.quant)
        with suppress(
            DamagedModel, UnsupportedModel
        ):  # reading the files reports it, if there is no other edition
            if (path := _path_in_cache(candidate)) and not missing_files(path):
                return candidate
    return repo


def model_in_cache(repo: RepoName) -> Path | None:
    """Return the GGUF file, or the snapshot folder, complete or not, or None if it is not in the cache.

    Raises ModelNotFound if several models match.
    """
    return _path_in_cache(edition_in_cache(repo))


def _path_in_cache(repo: RepoName) -> Path | None:
    snapshot = cached_folder(repo.repo, repo.revision)
    if snapshot is None or (repo.quant is None and has_safetensors(snapshot)):
        return snapshot
    models = models_in_snapshot(snapshot)
    if not models:
        return snapshot if repo.quant is None else None
    try:
        model = choose_model([model.relative_to(snapshot) for model in models], repo.quant, repo.repo)
    except ModelNotFound:
        if repo.quant:
            return None  # only other models of this repository are in the cache
        raise
    return snapshot / model


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has safetensors weights; config.json alone is also common in repositories of GGUF files."""
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    )


def _bundled_model(entry: CatalogEntry) -> Path:
    folder = bundled_folder(entry)
    if folder is None or missing_files(folder):
        raise ModelNotFound(f"the model {entry.name} is missing from this installation", "install localllm again")
    return folder


def _resolve_path(given: Path, name: str) -> ModelRef:
    path = _single_gguf(given)
    if is_gguf(path):
        if missing := missing_files(path):
            raise ModelNotFound(f"{path.parent} has no {missing[0]}", "fetch all parts of the model")
        return ModelRef(model_name(path), path)
    if path.is_file():
        remedy = f"run its folder: `localllm run {path.parent}`" if path.suffix == ".safetensors" else None
        remedy = remedy or "give a GGUF file, or a folder with config.json, tokenizer.json and model.safetensors"
        raise UnsupportedModel(f"{name} is not a model file that can be loaded on its own", remedy)
    if not path.is_dir():
        raise ModelNotFound(f"there is no folder or file {name}", "`localllm list --all` shows the known names")
    if missing := missing_files(path):
        raise ModelNotFound(f"the folder {name} has no {', '.join(missing)}", "give the folder of a whole model")
    return ModelRef(path.resolve().name if path.name in ("", "..") else path.name, path)


def _single_gguf(path: Path) -> Path:
    """Return the GGUF file of a folder that has one and no other weights, otherwise the path itself.

    Raises ModelNotFound if the folder has several GGUF models.
    """
    if not path.is_dir() or has_safetensors(path):
        return path
    models = models_in_folder(path)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ModelNotFound(f"the folder {path} contains several models: {names}", "give the path of one")
    return models[0] if models else path


def installed_models() -> Iterator[ModelRef]:
    """Yield the complete models on this machine: those of the catalogue by its names, others in the cache by
    ORG/REPO, then all aliases and editions. Reads many folders."""
    yielded = set()
    for entry in catalog_entries():
        with suppress(LocalLLMError):  # one damaged folder must not hide the others
            path = model_in_cache(repo) if (repo := repo_of_entry(entry)) else bundled_folder(entry)
            if path and path.exists() and not missing_files(path):
                yielded.add(path)
                yield ModelRef(entry.name, path)
    yield from (ModelRef(name, path) for name, path in cached_models() if path not in yielded)
    for name in dict.fromkeys([*read_aliases(), *edition_files()]):
        with suppress(LocalLLMError):  # its model is not on this machine
            yield ModelRef(name, resolve_model(name).path)

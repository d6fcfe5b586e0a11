"""From a name to the model on this machine: its folder, or its GGUF file. Never the network."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.hub.catalog import CatalogEntry, boxed_folder, catalog_entries
from localllm.hub.gguf import choose_model, is_gguf, model_name, models_in_folder, models_in_snapshot
from localllm.hub.hf_cache import cached_folder, cached_models
from localllm.hub.local_names import edition_files, find_edition, read_aliases
from localllm.hub.model_files import INDEX_FILE, SINGLE_FILE, missing_files
from localllm.hub.names import RepoName, is_path, parse_name, repo_of_entry, strip_latest
from localllm.modelfile.edition import Edition


@dataclass(frozen=True)
class ModelRef:
    """A model on this machine. A name is resolved to one where it enters the program, and travels no further."""

    name: str
    path: Path  # the folder with its config.json and weights, or a file of a GGUF model
    edition: Edition | None = None  # that the name stands for

    @property
    def key(self) -> str:
        """The same for every name of the same files."""
        return str(self.path.resolve())


def resolve_model(name: str, *, paths: bool = True) -> ModelRef:
    """Find the folder of a model, or its GGUF file. paths: as of `parse_name`.

    Raises ModelNotFound where nothing of that name is here (with near names, or how to download it) and
    UnsupportedModel where the name is that of another single file.
    """
    located = locate_model(name, paths=paths)
    if isinstance(located, RepoName):
        return ModelRef(strip_latest(name), downloaded_path(located, name), find_edition(strip_latest(name)))
    return located


def locate_model(name: str, *, paths: bool = True) -> ModelRef | RepoName:
    """The model, or the repository to pull it from where it is not on this machine, or not completely. Raises as
    `resolve_model`."""
    plain = strip_latest(name)
    match parse_name(name, paths=paths):
        case RepoName() as repo:
            path = model_in_cache(repo)
            return repo if path is None or missing_files(path) else ModelRef(plain, path, find_edition(plain))
        case CatalogEntry() as entry:
            return ModelRef(plain, _bundled_folder(entry), find_edition(plain))
        case Path() as path:
            ref = _resolve_path(path, name)
            return ref if paths and is_path(name) else ModelRef(plain, ref.path, find_edition(plain))


def downloaded_path(repo: RepoName, name: str) -> Path:
    """Its folder in the cache, or its GGUF file; whole.

    name: what the user calls it, for the message. Raises ModelNotFound where it is not here, or not whole.
    """
    path = model_in_cache(repo)
    missing = missing_files(path) if path else None
    if path and not missing:
        return path
    state = f"is here without {' and '.join(missing)}" if missing else "is not on this machine"
    raise ModelNotFound(f"{name} {state}", f"run `localllm pull {name}`")


def missing_repo(name: str) -> RepoName | None:
    """The repository that a name stands for, where its model is not here, or not whole. Raises ModelNotFound as
    `parse` and `is_downloaded`."""
    repo = parse_name(name)
    return repo if isinstance(repo, RepoName) and not is_downloaded(repo) else None


def is_downloaded(repo: RepoName) -> bool:
    """Whole? Raises ModelNotFound where several models that are here could be meant."""
    path = model_in_cache(repo)
    return path is not None and not missing_files(path)


def model_in_cache(repo: RepoName) -> Path | None:
    """The GGUF file that is meant, or the folder with config.json, complete or not; None if it is not here.

    Raises ModelNotFound where several could be meant.
    """
    snapshot = cached_folder(repo.repo, repo.revision)
    if snapshot is None or (repo.quant is None and has_safetensors(snapshot)):
        return snapshot
    models = models_in_snapshot(snapshot)
    if not models:
        return snapshot if repo.quant is None else None
    try:
        chosen = choose_model([model.relative_to(snapshot) for model in models], repo.quant, repo.repo)
    except ModelNotFound:
        if repo.quant:
            return None  # of this repository other models are here
        raise
    return snapshot / chosen


def has_safetensors(folder: Path) -> bool:
    """Repositories of GGUF files often hold the config.json of the model, too, but no other weights."""
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    )


def _bundled_folder(entry: CatalogEntry) -> Path:
    folder = boxed_folder(entry)
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
        instead = f"run its folder: `localllm run {path.parent}`" if path.suffix == ".safetensors" else None
        instead = instead or "give a GGUF file, or a folder with config.json, tokenizer.json and model.safetensors"
        raise UnsupportedModel(f"{name} is a file that cannot be run by itself", instead)
    if not path.is_dir():
        raise ModelNotFound(f"there is no folder or file {name}", "`localllm list --all` shows the known names")
    if missing := missing_files(path):
        raise ModelNotFound(f"the folder {name} has no {', '.join(missing)}", "give the folder of a whole model")
    return ModelRef(path.resolve().name if path.name in ("", "..") else path.name, path)


def _single_gguf(folder: Path) -> Path:
    """The GGUF file of a folder that holds one and no other weights, else what was given.

    Raises ModelNotFound where it holds several.
    """
    if not folder.is_dir() or has_safetensors(folder):
        return folder
    models = models_in_folder(folder)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ModelNotFound(f"the folder {folder} holds several models: {names}", "give the path of one")
    return models[0] if models else folder


# The models on this machine by every name that runs them. Never the network.


def installed_models() -> Iterator[ModelRef]:
    """Each with where it lies: those of the catalogue by its names, other ones of the cache by ORG/REPO, and under
    every name that a person gave or made. Only whole ones. Reads folders, so it takes a moment."""
    shown = set()
    for entry in catalog_entries():
        with suppress(LocalLLMError):  # one damaged folder must not hide the others
            path = model_in_cache(repo) if (repo := repo_of_entry(entry)) else boxed_folder(entry)
            if path and path.exists() and not missing_files(path):
                shown.add(path)
                yield ModelRef(entry.name, path)
    yield from (ModelRef(name, path) for name, path in cached_models() if path not in shown)
    for name in dict.fromkeys([*read_aliases(), *edition_files()]):
        with suppress(LocalLLMError):  # of what is not here
            yield ModelRef(name, resolve_model(name).path)

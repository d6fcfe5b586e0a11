"""From what a user calls a model to the folder it lies in, or to its GGUF file.

demo, qwen3:0.6b      an alias of models.toml
Qwen/Qwen3-0.6B       a repository of huggingface.co that is in the cache
./folder, ./x.gguf    a path; a plain name that is no alias may be one, too
"""

import difflib
import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from localllm.errors import ModelNotFound, UnsupportedModel
from localllm.hub.catalog import CatalogEntry, boxed_folder, catalog
from localllm.hub.folder import INDEX, SINGLE, missing_files
from localllm.hub.gguf import is_gguf, model_name, models_in
from localllm.hub.store import cached_folder, cached_models

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
ALIAS = re.compile(rf"{WORD}(:{WORD})?")
REPO = re.compile(rf"{WORD}/{WORD}")


@dataclass(frozen=True)
class ModelRef:
    """A model on this machine: what to call it, and the folder with its config.json and weights, or a file of a
    GGUF model."""

    name: str
    path: Path


def resolve(name: str) -> ModelRef:
    """Find the folder of a model, or its GGUF file.

    Raises ModelNotFound where nothing of that name is here (with near names, or how to download it) and
    UnsupportedModel where the name is that of another single file.
    """
    if is_path(name):
        return _resolve_path(name)
    if entry := catalog().get(name):
        return _resolve_entry(entry)
    if REPO.fullmatch(name):
        return ModelRef(name, _downloaded(name, name))
    _not_found(name)


def is_path(name: str) -> bool:
    """Is this meant as a path? A colon or a slash alone does not make one: `qwen3:4b`, `org/repo`."""
    return name not in catalog() and (
        name in (".", "..")
        or name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
        or name.endswith(("/", ".gguf", ".safetensors"))
        or os.path.exists(name)  # unlike Path.exists, False for a name too long or with a NUL
    )


def near_names(name: str) -> list[str]:
    """Names of models that could have been meant, likeliest first."""
    known = [*catalog(), *(repo for repo, _ in cached_models())]
    tags = [other for other in known if other.startswith(f"{name}:")]
    return (tags + [near for near in difflib.get_close_matches(name, known, n=4) if near not in tags])[:4]


def _resolve_path(name: str) -> ModelRef:
    path = _model_in(Path(name).expanduser())
    if is_gguf(path):
        if missing := missing_files(path):
            raise ModelNotFound(f"{path.parent} has no {missing[0]}", "fetch all parts of the model")
        return ModelRef(model_name(path), path)
    if path.is_file():
        instead = f"run its folder: `localllm run {path.parent}`" if path.suffix == ".safetensors" else None
        instead = instead or "give a GGUF file, or a folder with config.json, tokenizer.json and model.safetensors"
        raise UnsupportedModel(f"{name} is a file that cannot be run by itself", instead)
    if not path.is_dir():
        raise ModelNotFound(f"there is no folder or file {name}", "`localllm list` shows the models known by name")
    if missing := missing_files(path):
        raise ModelNotFound(f"the folder {name} has no {', '.join(missing)}", "give the folder of a whole model")
    return ModelRef(path.resolve().name, path)


def _model_in(folder: Path) -> Path:
    """The GGUF file of a folder that holds one and no other weights, else the folder itself.

    Raises ModelNotFound where it holds several.
    """
    if not folder.is_dir() or _has_safetensors(folder):
        return folder
    models = models_in(folder)
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise ModelNotFound(f"the folder {folder} holds several models: {names}", "give the path of one")
    return models[0] if models else folder


def _has_safetensors(folder: Path) -> bool:
    """Repositories of GGUF files often hold the config.json of the model, too, but no other weights."""
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in (SINGLE, INDEX))


def _resolve_entry(entry: CatalogEntry) -> ModelRef:
    if entry.repo:
        return ModelRef(entry.name, _downloaded(entry.name, entry.repo))
    folder = boxed_folder(entry)
    if folder is None or missing_files(folder):
        raise ModelNotFound(f"the model {entry.name} is missing from this installation", "install localllm again")
    return ModelRef(entry.name, folder)


def _downloaded(name: str, repo: str) -> Path:
    folder = cached_folder(repo)
    folder = folder and _model_in(folder)
    missing = missing_files(folder) if folder else None
    if folder and not missing:
        return folder
    state = f"is here without {' and '.join(missing)}" if missing else "is not on this machine"
    raise ModelNotFound(
        f"{name} {state}, and this version does not download by itself yet",
        f"run `hf download {repo}`, then `localllm run {name}`",
    )


def _not_found(name: str) -> NoReturn:
    if not ALIAS.fullmatch(name):
        raise ModelNotFound(
            f"{name!r} is not a name of a model",
            "give a name of `localllm list`, ORG/REPO or the path of a folder",
        )
    near = near_names(name)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFound(f"no model is called {name}", f"{guess}`localllm list` shows the names")

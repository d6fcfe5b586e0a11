"""Which files of a repository a model needs: one edition of its weights, and what stands beside them. Not README's
pictures, the same weights as pickles, or for other programs."""

from collections.abc import Callable
from pathlib import PurePosixPath

from localllm.errors import UnsupportedModel
from localllm.files import TOKENIZER_FILES, parse_json
from localllm.hub.folder import (
    COMPANION_FILES,
    INDEX_FILE,
    SINGLE_FILE,
    TEMPLATES_FOLDER,
    files_in_index,
    is_pickle,
    refuse_pickles,
)
from localllm.hub.gguf import choose_model, distinct_models, part_files
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.modules import MODULES_FILE, parse_modules

ReadFile = Callable[[RemoteFile], bytes]  # the content of a small file


def select_files(listing: Listing, read: ReadFile) -> tuple[RemoteFile, ...]:
    """The files of the model that `listing.repo` names, weights last.

    Safetensors before GGUF where nobody asks for one of the GGUF models. Raises UnsupportedModel where there is
    nothing that can be run, ModelNotFound where several GGUF models could be meant, DamagedModel for an index that
    names strange files.
    """
    weights = _safetensors(listing, read) if listing.repo.quant is None else ()
    if weights:
        return (*_companion_files(listing), *_module_files(listing, read), *weights)
    models = distinct_models(PurePosixPath(file.path) for file in listing.files)
    if not models:
        _raise_unsupported(listing)
    chosen = choose_model(models, listing.repo.quant, listing.repo.repo)
    readme = listing.find("README.md")
    return (*([readme] if readme else []), *(_require_file(listing, str(part)) for part in part_files(chosen)))


def _safetensors(listing: Listing, read: ReadFile) -> tuple[RemoteFile, ...]:
    single, index = listing.find(SINGLE_FILE), listing.find(INDEX_FILE)
    if not listing.find("config.json") or not (single or index):
        return ()
    if index is None:
        return (single,) if single else ()
    path = PurePosixPath(listing.repo.repo, INDEX_FILE)
    return index, *(_require_file(listing, name) for name in files_in_index(parse_json(read(index), path), path))


def _companion_files(listing: Listing) -> list[RemoteFile]:
    tokenizer = next((file for name in TOKENIZER_FILES if (file := listing.find(name))), None)
    if tokenizer is None:
        raise UnsupportedModel(
            f"{listing.repo.repo} has no tokenizer that localllm reads ({', '.join(TOKENIZER_FILES)})",
            "use another edition of the model",
        )
    found = [file for name in COMPANION_FILES if (file := listing.find(name))]
    templates = [
        file for file in listing.files if PurePosixPath("/", file.path).match(f"/{TEMPLATES_FOLDER}/*.jinja")
    ]
    return [*found, tokenizer, *templates]


def _module_files(listing: Listing, read: ReadFile) -> list[RemoteFile]:
    """What an embedder has in folders of their own."""
    listed = listing.find(MODULES_FILE)
    modules = parse_modules(read(listed), PurePosixPath(listing.repo.repo, MODULES_FILE)) if listed else ()
    return [_require_file(listing, file) for module in modules for file in module.files]


def _require_file(listing: Listing, path: str) -> RemoteFile:
    if file := listing.find(path):
        return file
    raise UnsupportedModel(f"{listing.repo} lacks {path}, a part of its own weights", "use another edition of it")


def _raise_unsupported(listing: Listing) -> None:
    names = [file.path for file in listing.files]
    if listing.repo.quant is None:
        refuse_pickles(sorted(name for name in names if is_pickle(name)), listing.repo.repo)
    what = "GGUF files" if listing.repo.quant else "config.json with safetensors weights, and no GGUF file"
    raise UnsupportedModel(f"{listing.repo.repo} has no {what}", "use another edition of the model")

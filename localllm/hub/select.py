"""Which files of a repository a model needs: one edition of its weights, and what stands beside them. Not README's
pictures, the same weights as pickles, or for other programs."""

from collections.abc import Callable
from pathlib import PurePosixPath

from localllm.errors import UnsupportedModel
from localllm.files import TOKENIZER_FILES, parse_json
from localllm.hub.folder import BESIDE, INDEX, SINGLE, TEMPLATES, index_files, pickled, refuse_pickles
from localllm.hub.gguf import choose, models_of, parts
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.modules import MODULES, parse_modules

Read = Callable[[RemoteFile], bytes]  # the content of a small file


def select(listing: Listing, read: Read) -> tuple[RemoteFile, ...]:
    """The files of the model that `listing.repo` names, weights last.

    Safetensors before GGUF where nobody asks for one of the GGUF models. Raises UnsupportedModel where there is
    nothing that can be run, ModelNotFound where several GGUF models could be meant, DamagedModel for an index that
    names strange files.
    """
    weights = _safetensors(listing, read) if listing.repo.quant is None else ()
    if weights:
        return (*_beside(listing), *_modules(listing, read), *weights)
    models = models_of(PurePosixPath(file.path) for file in listing.files)
    if not models:
        _refuse(listing)
    chosen = choose(models, listing.repo.quant, listing.repo.repo)
    readme = listing.find("README.md")
    return (*([readme] if readme else []), *(_present(listing, str(part)) for part in parts(chosen)))


def _safetensors(listing: Listing, read: Read) -> tuple[RemoteFile, ...]:
    single, index = listing.find(SINGLE), listing.find(INDEX)
    if not listing.find("config.json") or not (single or index):
        return ()
    if index is None:
        return (single,) if single else ()
    path = PurePosixPath(listing.repo.repo, INDEX)
    return index, *(_present(listing, name) for name in index_files(parse_json(read(index), path), path))


def _beside(listing: Listing) -> list[RemoteFile]:
    tokenizer = next((file for name in TOKENIZER_FILES if (file := listing.find(name))), None)
    if tokenizer is None:
        raise UnsupportedModel(
            f"{listing.repo.repo} has no tokenizer that localllm reads ({', '.join(TOKENIZER_FILES)})",
            "use another edition of the model",
        )
    found = [file for name in BESIDE if (file := listing.find(name))]
    templates = [file for file in listing.files if PurePosixPath("/", file.path).match(f"/{TEMPLATES}/*.jinja")]
    return [*found, tokenizer, *templates]


def _modules(listing: Listing, read: Read) -> list[RemoteFile]:
    """What an embedder has in folders of their own."""
    listed = listing.find(MODULES)
    modules = parse_modules(read(listed), PurePosixPath(listing.repo.repo, MODULES)) if listed else ()
    return [_present(listing, file) for module in modules for file in module.files]


def _present(listing: Listing, path: str) -> RemoteFile:
    if file := listing.find(path):
        return file
    raise UnsupportedModel(f"{listing.repo} lacks {path}, a part of its own weights", "use another edition of it")


def _refuse(listing: Listing) -> None:
    names = [file.path for file in listing.files]
    if listing.repo.quant is None:
        refuse_pickles(sorted(name for name in names if pickled(name)), listing.repo.repo)
    what = "GGUF files" if listing.repo.quant else "config.json with safetensors weights, and no GGUF file"
    raise UnsupportedModel(f"{listing.repo.repo} has no {what}", "use another edition of the model")

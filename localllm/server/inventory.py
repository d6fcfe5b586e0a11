"""What lies on this machine, described as Ollama's API does; each model's files are read once. Knows nothing of
HTTP."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localllm.api.ollama.describe import ModelDetails, show_object
from localllm.api.ollama.responses import JsonObject
from localllm.checkpoint.header import read_header
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.hub.local_names import edition_files, find_edition
from localllm.hub.names import ALIAS_NAME, is_path, parse_name, similar_names, strip_latest
from localllm.hub.resolve import ModelRef, installed_models, resolve_model
from localllm.modelfile.edition import Edition
from localllm.text.infill import find_infill_tokens
from localllm.text.tokenizer import Tokenizer

# Names that clients send, and what to tell of those that nobody knows. Knows nothing of what is loaded.

PATH_PREFIXES = ("/", "./", "../", "~")


def resolve_client_name(name: str, given: Mapping[str, str]) -> ModelRef:
    """The model that a client means. given: names of the server's own, each with what it stands for.

    Raises ModelNotFound for what is not on this machine: paths are for whoever starts the server, and nothing is
    pulled unasked.
    """
    if name in given:
        return replace(resolve_model(given[name]), edition=None)
    name = strip_latest(name)
    if edition := find_edition(name):
        return replace(resolve_model(edition.source), edition=edition)
    if name.startswith(PATH_PREFIXES):  # `parse` would advise to give one
        raise ModelNotFound(f"{name!r} is a path", "ask for one of the names that the server lists")
    check_name_exists(name)
    ref = resolve_model(name, paths=False)  # the same whether or not there is a file of that name
    if is_path(name):
        raise ModelNotFound(f"{name!r} is a path, too", "ask for one of those that the server lists")
    return ref


def check_name_exists(name: str) -> None:
    """Raises ModelNotFound where the name stands for nothing, here or elsewhere."""
    try:
        parse_name(name, paths=False)
    except ModelNotFound as error:
        near = similar_names(name) if ALIAS_NAME.fullmatch(name) else []  # a long one takes its time
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelNotFound(error.message, f"{guess}GET /v1/models lists the names") from error


FileState = tuple[int, int]  # when a folder or file was changed, and its size: another model has others


class Inventory:
    """Blocking: its methods are for threads, any number of them."""

    def __init__(self, aliases: Mapping[str, str]):
        """aliases: names of the server's own with what each stands for, as of `Models`."""
        self.aliases = aliases
        self.details_cache: dict[Path, tuple[FileState, ModelDetails]] = {}
        self.infill_cache: dict[Path, bool] = {}

    def list_models(self) -> list[ModelDetails]:
        """Newest first, as Ollama does; a model whose files cannot be read is no model."""
        found: list[ModelDetails] = []
        here = {ref.name: ref.path for ref in installed_models() if ref.name not in self.aliases}
        for name in (*self.aliases, *here):
            with suppress(LocalLLMError):
                found.append(self.details_of(name, here.get(name) or self.path_of(name, name)))
        return sorted(found, key=lambda one: -one.modified_at)

    def details_of(self, name: str, path: Path) -> ModelDetails:
        """Raises what reading its files raises."""
        edition = None if name in self.aliases else find_edition(name)
        try:
            state = path.stat()
        except OSError as error:
            raise ModelNotFound(f"the files of {name} are gone", "fetch them again") from error
        seen = (state.st_mtime_ns, state.st_size)
        if path not in self.details_cache or self.details_cache[path][0] != seen:
            self.details_cache[path] = seen, ModelDetails.read(name, path)
        plain = self.details_cache[path][1]
        if edition:
            return plain.with_edition(name, edition, edition_files()[name].stat().st_mtime)
        return plain.with_name(name)

    def show(self, client_name: str, system: str, template: str, *, verbose: bool) -> JsonObject:
        """What `/api/show` tells; system and template: others to look at. Raises ModelNotFound, and what reading
        the files raises."""
        name = client_name if client_name in self.aliases else strip_latest(client_name)
        path = self.path_of(name, client_name)
        edition = None if name in self.aliases else find_edition(name)
        if system or template:
            own = edition or Edition(name)
            edition = replace(own, system=system or own.system, template=template or own.template)
        return show_object(
            self.details_of(name, path), edition, can_insert=self.supports_infill(path), verbose=verbose
        )

    def context_for(self, ref: ModelRef, wanted: int | None) -> int | None:
        """Tokens of prompt and answer that a model is to be loaded for: what is wanted, by the request or else by
        the edition, as far as the model knows so many. What reading its files raises."""
        wanted = wanted or (ref.edition.context if ref.edition else None)
        return min(wanted, self.details_of(ref.name, ref.path).context) if wanted else None

    def path_of(self, name: str, client_name: str) -> Path:
        """Paths are for whoever starts the server, never for clients."""
        try:
            return resolve_client_name(name, self.aliases).path
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{client_name}' not found", error.remedy) from error

    def supports_infill(self, path: Path) -> bool:
        """Was the model trained to? Builds its tokenizer, once."""
        if path not in self.infill_cache:
            header = read_header(path)
            tokenizer = Tokenizer.from_checkpoint(header.path, header.gguf)
            self.infill_cache[path] = find_infill_tokens(tokenizer) is not None
        return self.infill_cache[path]

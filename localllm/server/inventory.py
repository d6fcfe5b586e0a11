"""Installed models: the names that clients may use for them, and their descriptions as in Ollama's API."""

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

PATH_PREFIXES = ("/", "./", "../", "~")

FileState = tuple[int, int]  # modification time in ns and size of a folder or file


def resolve_client_name(name: str, aliases: Mapping[str, str]) -> ModelRef:
    """The model that a client means by a name. aliases: the server's own names, each with its target.

    Raises ModelNotFound if the model is not installed, as nothing is pulled implicitly, and for a path, as only
    the operator may use these.
    """
    if name in aliases:
        return replace(resolve_model(aliases[name]), edition=None)
    name = strip_latest(name)
    if edition := find_edition(name):
        return replace(resolve_model(edition.source), edition=edition)
    if name.startswith(PATH_PREFIXES):  # the remedy of `resolve_model` would suggest a path
        raise ModelNotFound(f"{name!r} is a path", "use one of the names that the server lists")
    check_name_exists(name)
    ref = resolve_model(name, paths=False)  # whether or not a file has that name
    if is_path(name):
        raise ModelNotFound(f"{name!r} is also a path", "use one of the names that the server lists")
    return ref


def check_name_exists(name: str) -> None:
    """Raises ModelNotFound for a name that cannot exist, with suggestions."""
    try:
        parse_name(name, paths=False)
    except ModelNotFound as error:
        similar = similar_names(name) if ALIAS_NAME.fullmatch(name) else []  # slow for long names
        suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise ModelNotFound(error.message, f"{suggestion}GET /v1/models lists the names") from error


class Inventory:
    """Descriptions of the installed models, cached by file state. Methods block and are thread-safe."""

    def __init__(self, aliases: Mapping[str, str]):
        """aliases: the server's own names with their targets, as in `ModelPool`."""
        self.aliases = aliases
        self.details_cache: dict[Path, tuple[FileState, ModelDetails]] = {}
        self.infill_cache: dict[Path, bool] = {}

    def list_models(self) -> list[ModelDetails]:
        """All models, newest first as in Ollama, without those whose files cannot be read."""
        models: list[ModelDetails] = []
        installed = {ref.name: ref.path for ref in installed_models() if ref.name not in self.aliases}
        for name in (*self.aliases, *installed):
            with suppress(LocalLLMError):
                models.append(self.details_of(name, installed.get(name) or self.path_of(name, name)))
        return sorted(models, key=lambda details: -details.modified_at)

    def details_of(self, name: str, path: Path) -> ModelDetails:
        """Raises ModelNotFound if the files are gone, and LocalLLMError if they cannot be read."""
        edition = None if name in self.aliases else find_edition(name)
        try:
            state = path.stat()
        except OSError as error:
            raise ModelNotFound(f"the files of {name} are gone", "pull it again") from error
        file_state = (state.st_mtime_ns, state.st_size)
        if path not in self.details_cache or self.details_cache[path][0] != file_state:
            self.details_cache[path] = file_state, ModelDetails.read(name, path)
        details = self.details_cache[path][1]
        if edition:
            return details.with_edition(name, edition, edition_files()[name].stat().st_mtime)
        return details.with_name(name)

    def show(self, client_name: str, system: str, template: str, *, verbose: bool) -> JsonObject:
        """Answer of `/api/show`. system, template: shown instead of the model's own, if not empty. Raises
        ModelNotFound, and LocalLLMError if the files cannot be read."""
        name = client_name if client_name in self.aliases else strip_latest(client_name)
        path = self.path_of(name, client_name)
        edition = None if name in self.aliases else find_edition(name)
        if system or template:
            own = edition or Edition(name)
            edition = replace(own, system=system or own.system, template=template or own.template)
        return show_object(
            self.details_of(name, path), edition, can_insert=self.supports_infill(path), verbose=verbose
        )

    def context_for(self, ref: ModelRef, requested: int | None) -> int | None:
        """Context in tokens to load a model with: as requested, or as the edition says, up to the model's maximum;
        None for the default. Raises LocalLLMError if the model's files cannot be read."""
        requested = requested or (ref.edition.context if ref.edition else None)
        return min(requested, self.details_of(ref.name, ref.path).context) if requested else None

    def path_of(self, name: str, client_name: str) -> Path:
        """Path of a model by name. Raises ModelNotFound in Ollama's words, with the name as the client sent it."""
        try:
            return resolve_client_name(name, self.aliases).path
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{client_name}' not found", error.remedy) from error

    def supports_infill(self, path: Path) -> bool:
        """Whether the model has infill tokens. Builds its tokenizer, once."""
        if path not in self.infill_cache:
            header = read_header(path)
            tokenizer = Tokenizer.from_checkpoint(header.path, header.gguf)
            self.infill_cache[path] = find_infill_tokens(tokenizer) is not None
        return self.infill_cache[path]

"""What lies on this machine, described as Ollama's API does; each model's files are read once. Knows nothing of
HTTP."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localllm.api.ollama.described import Described, shown
from localllm.api.ollama.responses import Object
from localllm.checkpoint.header import read_header
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.hub.installed import installed
from localllm.hub.made import edition_of, made_files
from localllm.hub.names import known_as
from localllm.hub.resolve import resolve
from localllm.modelfile.edition import Edition
from localllm.server.names import source_of
from localllm.text.infill import marks_of

Seen = tuple[int, int]  # when a folder or file was changed, and its size: another model has others


class Inventory:
    """Blocking: its methods are for threads, any number of them."""

    def __init__(self, given: Mapping[str, str]):
        """given: names of the server's own with what each stands for, as of `Models`."""
        self.given = given
        self.read: dict[Path, tuple[Seen, Described]] = {}
        self.fills: dict[Path, bool] = {}

    def all(self) -> list[Described]:
        """Newest first, as Ollama does; a model whose files cannot be read is no model."""
        found: list[Described] = []
        here = {ref.name: ref.path for ref in installed() if ref.name not in self.given}
        for name in (*self.given, *here):
            with suppress(LocalLLMError):
                found.append(self.described(name, here.get(name) or self.path_of(name, name)))
        return sorted(found, key=lambda one: -one.modified)

    def described(self, name: str, path: Path) -> Described:
        """Raises what reading its files raises."""
        edition = None if name in self.given else edition_of(name)
        try:
            state = path.stat()
        except OSError as error:
            raise ModelNotFound(f"the files of {name} are gone", "fetch them again") from error
        seen = (state.st_mtime_ns, state.st_size)
        if path not in self.read or self.read[path][0] != seen:
            self.read[path] = seen, Described.read(name, path)
        plain = self.read[path][1]
        if edition:
            return plain.edited(name, edition, made_files()[name].stat().st_mtime)
        return plain.called(name)

    def shown(self, asked: str, system: str, template: str, *, verbose: bool) -> Object:
        """What `/api/show` tells; system and template: others to look at. Raises ModelNotFound, and what reading
        the files raises."""
        name = asked if asked in self.given else known_as(asked)
        path = self.path_of(name, asked)
        edition = None if name in self.given else edition_of(name)
        if system or template:
            own = edition or Edition(name)
            edition = replace(own, system=system or own.system, template=template or own.template)
        return shown(self.described(name, path), edition, insert=self.fills_gaps(path), verbose=verbose)

    def room(self, asked: str, wanted: int | None) -> int | None:
        """Tokens of prompt and answer that a model is to be loaded for: what is wanted, by the request or else by
        the edition, as far as the model knows so many. Raises as `shown`."""
        name = asked if asked in self.given else known_as(asked)
        path = self.path_of(name, asked)
        edition = None if name in self.given else edition_of(name)
        wanted = wanted or (edition.context if edition else None)
        return min(wanted, self.described(name, path).context) if wanted else None

    def path_of(self, name: str, asked: str) -> Path:
        """Paths are for whoever starts the server, never for clients."""
        try:
            return resolve(source_of(name, self.given)).path
        except ModelNotFound as error:
            raise ModelNotFound(f"model '{asked}' not found", error.remedy) from error

    def fills_gaps(self, path: Path) -> bool:
        """Was the model trained to? Builds its tokenizer, once."""
        if path not in self.fills:
            self.fills[path] = marks_of(read_tokenizer(read_header(path))) is not None
        return self.fills[path]

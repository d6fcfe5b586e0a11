"""A model in a server, shaped like an LLM in this process: what asks the one may ask the other. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.client.server import HELLO_S, Object, Server, checked
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.params import params_from_json, params_to_json
from localllm.request import GenerationEvent, Request, SamplingParams
from localllm.wire import event_from_json

if TYPE_CHECKING:
    from localllm import receipt  # only those who want one wait for what it needs
    from localllm.inspection import Reads


class ServedModel:
    """What a command needs of an LLM. One answer at a time; `close` ends the connection and with it the answer."""

    def __init__(self, server: Server, facts: Mapping[str, Any]):
        """facts: as `POST /localllm/open` tells them. Raises LocalLLMError where they are of another version."""
        self.server = server
        self.tokenizer = Texts()
        self.answering: AnswerStream | None = None
        try:
            self.version = str(facts["version"])
            self.name = str(facts["name"])
            self.device = str(facts["device"])
            self.dtype = str(facts["dtype"])
            self.kv_dtype = str(facts["kv_dtype"])
            self.context = int(facts["context"])
            self.weight_bytes = int(facts["weight_bytes"])
            self.deterministic = bool(facts["deterministic"])
            self.has_chat_template = bool(facts["has_chat_template"])
            self.default_params = params_from_json(facts["default_params"])
            self.blocks = int(facts["blocks"])
            self.block_tokens = int(facts["block_tokens"])
            self.read_bytes = dict(facts["reads"])
        except (LookupError, TypeError, ValueError, AttributeError, LocalLLMError):
            raise unknown(server.url) from None

    @property
    def reads(self) -> "Reads":
        from localllm.steps import reads_from_json

        try:
            return reads_from_json(self.read_bytes)
        except (LookupError, TypeError, ValueError):
            raise unknown(self.server.url) from None

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """As `LLM.template_arguments`, which is asked only where there is something to check."""
        if not given and think is None and not with_tools:
            return {}
        asked = {"model": self.name, "given": dict(given), "think": think, "with_tools": with_tools}
        arguments = self.server.ask("/localllm/template-arguments", asked, within=None).get("arguments")
        if not isinstance(arguments, dict):
            raise unknown(self.server.url)
        return arguments

    def prepare(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        inspect: int | None = None,
    ) -> Request:
        """As `LLM.prepare`. The server begins to answer, too, so that `submit` need not ask again."""
        params = params or self.default_params
        asked: Object = {"model": self.name, "prompt": prompt, "params": params_to_json(params)}
        asked |= {"tools": tools, "template_arguments": template_arguments or {}, "inspect": inspect}
        lines = self.server.stream("/localllm/answer", asked)
        try:
            ids = tuple(map(int, next(lines)["prompt_ids"]))
        except (StopIteration, LookupError, TypeError, ValueError):
            raise unknown(self.server.url) from None
        is_chat = not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
        request = Request(ids, params, 0.0, is_chat, tuple(tools or ()), inspect=inspect)
        self.answering = AnswerStream(self.server, lines, self.tokenizer)
        return request

    def submit(self, request: Request) -> "AnswerStream":
        """The answer to what was prepared last."""
        assert self.answering is not None
        stream, self.answering = self.answering, None
        return stream

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        inspect: int | None = None,
    ) -> "AnswerStream":
        return self.submit(self.prepare(prompt, params, tools, template_arguments, inspect=inspect))

    def provenance(self) -> "tuple[receipt.Model, receipt.Setup]":
        from localllm.receipt import provenance_from_json

        found = self.server.ask("/localllm/provenance", {"model": self.name}, within=None)
        try:
            return provenance_from_json(found["model"], found["setup"])
        except (LookupError, ValueError):
            raise unknown(self.server.url) from None

    def kernels(self) -> "receipt.Kernels":
        found = self.server.ask("/localllm/provenance", {"model": self.name}, within=None).get("kernels")
        if not isinstance(found, dict):
            raise unknown(self.server.url)
        return {name: tuple(kernels) for name, kernels in found.items()}

    def record(self, metrics: Metrics, home: Path, note: Callable[[str], None]) -> None:
        """Nothing: beside other answers it says little of what this machine reaches."""

    def close(self) -> None:
        self.server.close()


class Texts:
    """The texts of those tokens that the server has named: beside log probabilities, drafts and candidates."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return "".join(self.known[token] for token in ids)


class AnswerStream(Iterator[GenerationEvent]):
    """The answer, piece by piece, as `worker.Stream` gives it. Closing it before its end, from any thread, cancels
    it there, too."""

    def __init__(self, server: Server, lines: Iterator[Object], texts: Texts):
        self.server = server
        self.lines = lines
        self.texts = texts
        self.ended = False

    def __next__(self) -> GenerationEvent:
        if self.ended:
            raise StopIteration
        try:
            event, texts = event_from_json(next(self.lines))
        except (StopIteration, LookupError, TypeError, ValueError, AttributeError, LocalLLMError) as error:
            if self.ended:  # closed meanwhile
                raise StopIteration from None
            if isinstance(error, LocalLLMError):
                raise
            raise unknown(self.server.url) from None
        self.texts.known |= texts
        if event.finish_reason is not None:
            self.ended = True
            with suppress(StopIteration):  # so that the connection can be used again
                next(self.lines)
        return event

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self.server.close()


def unknown(url: str) -> LocalLLMError:
    return LocalLLMError(f"the server at {url} is of another version of localllm", "update the older of the two")


def open_model(server: Server, name: str, *, path: str | None, load: bool) -> ServedModel:
    """The model of that name, or the loaded one that lies there; load: also where it is not loaded yet.

    Takes over the server, and closes it where it raises: ModelNotFound where there is no such model, NoServer,
    OtherServer, and what the server says.
    """
    asked: Object = {"path": path} if path else {"model": name, "load": load}
    try:
        facts = server.ask("/localllm/open", asked, within=None if load else HELLO_S)
        return ServedModel(server, checked(facts, server.url))
    except BaseException:
        server.close()
        raise

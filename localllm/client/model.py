"""A model on a server with the interface of a local LLM. Does not import torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.api.events import event_from_json, step_reads_from_json
from localllm.client.server import REPLY_TIMEOUT_S, JsonObject, JsonStream, ServerClient, check_server_name
from localllm.errors import LocalLLMError
from localllm.metrics import Metrics
from localllm.request import ChatRequest, GenerationEvent, Request
from localllm.sampling import params_from_json, params_to_json

if TYPE_CHECKING:
    from localllm.metrics import StepReads
    from localllm.receipts import receipt  # imported only when a receipt is made


class RemoteModel:
    """Implements `conversation.model.Model`, one answer at a time. `close` cancels a running answer."""

    def __init__(self, server: ServerClient, facts: Mapping[str, Any]):
        """facts: the answer of `POST /localllm/open`. Raises LocalLLMError if it is of another version."""
        self.server = server
        self.tokenizer = RemoteTokenizer()
        self.prepared_stream: RemoteStream | None = None
        try:
            self.version = str(facts["version"])
            self.name = str(facts["name"])
            self.device = str(facts["device"])
            self.dtype = str(facts["dtype"])
            self.kv_dtype = str(facts["kv_dtype"])
            self.context = int(facts["context"])
            self.max_context = int(facts["max_context"])
            self.weight_bytes = int(facts["weight_bytes"])
            self.deterministic = bool(facts["deterministic"])
            self.has_chat_template = bool(facts["has_chat_template"])
            self.default_params = params_from_json(facts["default_params"])
            self.blocks = int(facts["blocks"])
            self.block_tokens = int(facts["block_tokens"])
            self.read_bytes = dict(facts["reads"])
        except (LookupError, TypeError, ValueError, AttributeError, LocalLLMError):
            raise version_mismatch(server.url) from None

    @property
    def reads(self) -> "StepReads":
        try:
            return step_reads_from_json(self.read_bytes)
        except (LookupError, TypeError, ValueError):
            raise version_mismatch(self.server.url) from None

    def measure_rates(self) -> None:
        """Do nothing: other requests of the server would distort a measurement."""

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """See `LLM.template_arguments`; sends no request if there is nothing to check."""
        if not given and think is None and not with_tools:
            return {}
        body = {"model": self.name, "given": dict(given), "think": think, "with_tools": with_tools}
        arguments = self.server.request_json("/localllm/template-arguments", body, timeout_s=None).get("arguments")
        if not isinstance(arguments, dict):
            raise version_mismatch(self.server.url)
        return arguments

    def prepare(self, chat: ChatRequest) -> Request:
        """See `LLM.prepare`. The server starts to answer, so that `submit` needs no second request."""
        params = chat.params or self.default_params
        body: JsonObject = {
            "model": self.name,
            "prompt": chat.prompt,
            "params": params_to_json(params),
            "tools": chat.tools,
            "template_arguments": dict(chat.template_arguments),
            "think": chat.think,
            "inspect": chat.inspect,
        }
        lines = self.server.stream_json("/localllm/answer", body, preface_lines=1)
        try:
            ids = tuple(map(int, next(lines)["prompt_ids"]))
        except (StopIteration, LookupError, TypeError, ValueError):
            raise version_mismatch(self.server.url) from None
        request = Request(ids, params, 0.0, chat.is_chat, tuple(chat.tools or ()), inspect=chat.inspect)
        self.prepared_stream = RemoteStream(self.server, lines, self.tokenizer)
        return request

    def submit(self, request: Request) -> "RemoteStream":
        """The answer to the request that was prepared last."""
        assert self.prepared_stream is not None
        stream, self.prepared_stream = self.prepared_stream, None
        return stream

    def answer(self, chat: ChatRequest) -> "RemoteStream":
        return self.submit(self.prepare(chat))

    def provenance(self) -> "tuple[receipt.Model, receipt.Setup]":
        from localllm.receipts.receipt import provenance_from_json

        facts = self.request_provenance()
        try:
            return provenance_from_json(facts["model"], facts["setup"])
        except (LookupError, ValueError):
            raise version_mismatch(self.server.url) from None

    def kernels(self) -> "receipt.Kernels":
        kernels = self.request_provenance().get("kernels")
        if not isinstance(kernels, dict):
            raise version_mismatch(self.server.url)
        return {operation: tuple(names) for operation, names in kernels.items()}

    def request_provenance(self) -> JsonObject:
        return self.server.request_json("/localllm/provenance", {"model": self.name}, timeout_s=None)

    def record(self, metrics: Metrics, home: Path, note: Callable[[str], None]) -> None:
        """Do nothing: a server's speed under load does not measure this machine."""

    def close(self) -> None:
        self.server.close()


class RemoteTokenizer:
    """Texts of the tokens that the server sent with log probabilities, draft tokens and candidates."""

    def __init__(self) -> None:
        self.token_texts: dict[int, str] = {}

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return "".join(self.token_texts[token] for token in ids)


class RemoteStream(Iterator[GenerationEvent]):
    """Events of an answer, as in `worker.Stream`. Closing it early, from any thread, cancels the answer on the
    server."""

    def __init__(self, server: ServerClient, lines: JsonStream, tokenizer: RemoteTokenizer):
        self.server = server
        self.lines = lines
        self.tokenizer = tokenizer
        self.is_closed = False

    def __next__(self) -> GenerationEvent:
        if self.is_closed:
            raise StopIteration
        try:
            event, texts = event_from_json(next(self.lines))
        except (StopIteration, LookupError, TypeError, ValueError, AttributeError, LocalLLMError) as error:
            if self.is_closed:  # closed by another thread
                raise StopIteration from None
            if isinstance(error, LocalLLMError):
                raise
            raise version_mismatch(self.server.url) from None
        self.tokenizer.token_texts |= texts
        if event.finish_reason is not None:
            self.is_closed = True
            with suppress(StopIteration):  # read to the end, so that the connection can be reused
                next(self.lines)
        return event

    @property
    def has_more(self) -> bool:
        return self.lines.has_more

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.lines.close()


def version_mismatch(url: str) -> LocalLLMError:
    return LocalLLMError(f"the server at {url} is another version of localllm", "update the older one")


def open_model(server: ServerClient, name: str, *, path: str | None, load: bool) -> RemoteModel:
    """Open the model of that name, or the loaded one at `path`. load: load it if necessary.

    Closes `server` if it raises: ModelNotFound, ServerUnreachable, NotLocalLLMServer, or an error of the server.
    """
    body: JsonObject = {"path": path} if path else {"model": name, "load": load}
    try:
        facts = server.request_json("/localllm/open", body, timeout_s=None if load else REPLY_TIMEOUT_S)
        return RemoteModel(server, check_server_name(facts, server.url))
    except BaseException:
        server.close()
        raise

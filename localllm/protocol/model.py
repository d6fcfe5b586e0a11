"""What a conversation and the command line need of a model, whether it runs in this process or in a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localllm.metrics import Metrics
from localllm.request import GenerationEvent, Request, SamplingParams

if TYPE_CHECKING:
    from localllm.metrics import StepReads
    from localllm.receipts import receipt  # only those who want one wait for what it needs


class Stream(Iterator[GenerationEvent], Protocol):
    def close(self) -> None:
        """Cancels it, from any thread: whoever waits for a piece finds the end at once."""
        ...


class ChatModel(Protocol):
    """What a conversation needs of an LLM."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def default_params(self) -> SamplingParams: ...
    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]: ...
    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        inspect: int | None = None,
    ) -> Stream: ...


class Tokenizer(Protocol):
    def decode(self, ids: list[int], *, skip_special: bool) -> str: ...


class Model(ChatModel, Protocol):
    """What the command line needs of an LLM."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def blocks(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def reads(self) -> "StepReads": ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def prepare(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        inspect: int | None = None,
    ) -> Request: ...
    def submit(self, request: Request) -> Stream: ...
    def provenance(self) -> "tuple[receipt.Model, receipt.Setup]": ...
    def kernels(self) -> "receipt.Kernels": ...
    def record(self, metrics: Metrics, home: Path, note: Callable[[str], None]) -> None: ...
    def close(self) -> None: ...

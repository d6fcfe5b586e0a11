"""What the body of a request asks of a model, in whichever API it was written. Knows nothing of HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from localllm.request import Request, SamplingParams, ToolUse
from localllm.text.infill import encode_infill, infill_end_ids
from localllm.text.tokenizer import Tokenizer

Prompt = str | list[int] | list[dict[str, Any]]


class RequestPreparer(Protocol):
    """What `Asked.prepare` needs of an LLM."""

    tokenizer: Tokenizer

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        tool_use: ToolUse | None = None,
        *,
        priority: int = 0,
        inspect: int | None = None,
    ) -> Request: ...
    def encode(
        self,
        prompt: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
        *,
        allow_ignored_tools: bool = False,
    ) -> list[int]: ...
    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ParsedRequest:
    """What one body asks of a model."""

    model: str
    prompts: tuple[Prompt, ...]
    """One, or several of a text completion."""

    params: SamplingParams
    is_chat: bool
    tools: list[dict[str, Any]] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    echo: bool = False
    """The prompt stands before the answer, with log probabilities of its own."""

    suffix: str | None = None
    """What stands behind the gap that the answer fills. Prompts are texts then."""

    n: int = 1
    """Answers to each prompt that are told, a choice each."""

    best_of: int | None = None
    """As many are made of each prompt, and the likeliest are told; None: `n`."""

    priority: int = 0
    """Who has more goes first where requests wait."""

    inspect: int | None = None
    """As Request.inspect."""

    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    """Each token is told of, also one without text, and how the answer goes with it."""

    @property
    def answers_per_prompt(self) -> int:
        """How many answers are made of each prompt."""
        return self.best_of or self.n

    def prepare(self, llm: RequestPreparer) -> list[Request]:
        """`each` requests of the first prompt, then of the second, ... Raises ContextOverflow and UsageError as
        `LLM.prepare` does, UnsupportedModel where the model fills no gaps."""
        params, prompts = self.params, self.prompts
        if self.best_of is not None and params.logprobs is None:
            params = replace(params, logprobs=0)  # which tell the likeliest
        if self.suffix is not None:
            prompts = [encode_infill(llm.tokenizer, str(prompt), self.suffix) for prompt in prompts]
            params = replace(params, stop_ids=(*params.stop_ids, *infill_end_ids(llm.tokenizer)))
        arguments = self._arguments(llm)
        first = [
            llm.prepare(
                prompt, params, self.tools, arguments, self.tool_use, priority=self.priority, inspect=self.inspect
            )
            for prompt in prompts
        ]
        return [
            request.with_choice_index(place) if place else request
            for request in first
            for place in range(self.answers_per_prompt)
        ]

    def count_prompt_tokens(self, llm: RequestPreparer) -> int:
        """How many tokens the prompts have, also where the context has no room for them. Raises UsageError."""
        arguments, unread = self._arguments(llm), self.tool_use.must_call
        return sum(
            len(llm.encode(prompt, self.tools, arguments, allow_ignored_tools=unread)) for prompt in self.prompts
        )

    def _arguments(self, llm: RequestPreparer) -> dict[str, Any]:
        if not self.is_chat:
            return {}
        with_tools = self.tools is not None and not self.tool_use.must_call
        return llm.template_arguments(self.template_arguments, think=self.think, with_tools=with_tools)

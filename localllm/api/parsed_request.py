"""The common form of the requests of all APIs but Ollama's."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from localllm.api.body import IGNORED_FIELDS, ignore_field
from localllm.errors import UsageError
from localllm.request import ChatRequest, Request, SamplingParams, ToolUse
from localllm.text.infill import encode_infill, infill_end_ids
from localllm.text.tokenizer import Tokenizer

PromptBody = str | list[int] | list[dict[str, Any]]


class RequestPreparer(Protocol):
    """The part of an LLM that `ParsedRequest.prepare` needs."""

    tokenizer: Tokenizer

    def prepare(self, chat: ChatRequest) -> Request: ...
    def encode(self, chat: ChatRequest) -> list[int]: ...
    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]: ...
    @property
    def thinks(self) -> bool: ...


@dataclass(frozen=True)
class ParsedRequest:
    """A request body, independent of its API."""

    model: str
    prompts: tuple[PromptBody, ...]
    """A text completion may have several."""

    params: SamplingParams
    is_chat: bool
    tools: list[dict[str, Any]] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    echo: bool = False
    """Whether the answer starts with the prompt, and its log probabilities."""

    suffix: str | None = None
    """Text after the gap that the answer fills (infill); the prompts are then strings."""

    n: int = 1
    """Answers returned per prompt, one choice each."""

    best_of: int | None = None
    """Answers generated per prompt, of which the `n` most likely are returned; None for `n`."""

    priority: int = 0
    """Queued requests with a higher priority run first."""

    inspect: int | None = None
    """See Request.inspect."""

    slot: int | None = None
    """See Request.slot."""

    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    """Whether every token gets a chunk with timings, even if it has no text yet."""

    @property
    def answers_per_prompt(self) -> int:
        """Number of answers generated per prompt."""
        return self.best_of or self.n

    def prepare(self, llm: RequestPreparer) -> list[Request]:
        """`answers_per_prompt` requests for the first prompt, then for the second, and so on. Raises
        ContextOverflow and UsageError as `LLM.prepare`, and UnsupportedModel for infill with a model that does not
        support it."""
        params, prompts = self.params, self.prompts
        if self.best_of is not None and params.logprobs is None:
            params = replace(params, logprobs=0)  # needed to rank the answers
        if self.suffix is not None:
            prompts = [encode_infill(llm.tokenizer, str(prompt), self.suffix) for prompt in prompts]
            params = replace(params, stop_ids=(*params.stop_ids, *infill_end_ids(llm.tokenizer)))
        first = [llm.prepare(self.chat_request(llm, prompt, params)) for prompt in prompts]
        return [
            request.with_choice_index(index) if index else request
            for request in first
            for index in range(self.answers_per_prompt)
        ]

    def count_prompt_tokens(self, llm: RequestPreparer) -> int:
        """Number of prompt tokens, even if they exceed the context. Raises UsageError."""
        return sum(len(llm.encode(self.chat_request(llm, prompt, self.params))) for prompt in self.prompts)

    def chat_request(self, llm: RequestPreparer, prompt: PromptBody, params: SamplingParams) -> ChatRequest:
        """The request for one of the prompts."""
        arguments, think = self.template_arguments, self.think
        if self.is_chat and IGNORED_FIELDS.get() is not None:
            with_tools = self.tools is not None and not self.tool_use.must_call
            arguments = known_template_arguments(llm, arguments, think=think, with_tools=with_tools)
            think = None
        return ChatRequest(
            prompt=prompt,
            params=params,
            tools=self.tools,
            template_arguments=arguments,
            think=think,
            tool_use=self.tool_use,
            priority=self.priority,
            inspect=self.inspect,
            slot=self.slot,
        )


def known_template_arguments(
    llm: RequestPreparer, arguments: Mapping[str, Any], *, think: bool | None, with_tools: bool
) -> dict[str, Any]:
    """The arguments that the chat template uses; the others are recorded in IGNORED_FIELDS. A reasoning_effort
    that the template does not use turns thinking on or off instead. Raises UsageError if the template does not
    support the tools."""
    llm.template_arguments({}, with_tools=with_tools)
    known: dict[str, Any] = {}
    for name, value in arguments.items():
        try:
            known |= llm.template_arguments({name: value}, with_tools=with_tools)
        except UsageError as error:
            if name == "reasoning_effort":
                think = value != "minimal" if think is None else think
                ignore_field(name, error.message)
            else:
                ignore_field(f"chat_template_kwargs.{name}", error.message)
    if think is not None:
        try:
            known = llm.template_arguments({}, think=think, with_tools=with_tools) | known
        except UsageError as error:
            if "reasoning_effort" not in arguments and (think or llm.thinks):
                ignore_field("thinking", error.message)
    return known

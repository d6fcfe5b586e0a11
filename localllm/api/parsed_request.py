"""What the body of a request asks of a model, in whichever API it was written. Knows nothing of HTTP."""

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
    """What `ParsedRequest.prepare` needs of an LLM."""

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
    """What one body asks of a model."""

    model: str
    prompts: tuple[PromptBody, ...]
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
        first = [llm.prepare(self.chat_request(llm, prompt, params)) for prompt in prompts]
        return [
            request.with_choice_index(place) if place else request
            for request in first
            for place in range(self.answers_per_prompt)
        ]

    def count_prompt_tokens(self, llm: RequestPreparer) -> int:
        """How many tokens the prompts have, also where the context has no room for them. Raises UsageError."""
        return sum(len(llm.encode(self.chat_request(llm, prompt, self.params))) for prompt in self.prompts)

    def chat_request(self, llm: RequestPreparer, prompt: PromptBody, params: SamplingParams) -> ChatRequest:
        """One of the prompts as a question of its own."""
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
        )


def known_template_arguments(
    llm: RequestPreparer, given: Mapping[str, Any], *, think: bool | None, with_tools: bool
) -> dict[str, Any]:
    """The arguments that the chat template reads; the others are noted in IGNORED_FIELDS. An effort of reasoning
    turns it on or off where the template knows no more. Raises UsageError where it reads no tools."""
    llm.template_arguments({}, with_tools=with_tools)
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        try:
            arguments |= llm.template_arguments({name: value}, with_tools=with_tools)
        except UsageError as error:
            if name == "reasoning_effort":
                think = value != "minimal" if think is None else think
                ignore_field(name, error.message)
            else:
                ignore_field(f"chat_template_kwargs.{name}", error.message)
    if think is not None:
        try:
            arguments = llm.template_arguments({}, think=think, with_tools=with_tools) | arguments
        except UsageError as error:
            if "reasoning_effort" not in given and (think or llm.thinks):
                ignore_field("thinking", error.message)
    return arguments

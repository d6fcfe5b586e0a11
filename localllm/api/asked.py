"""What the body of a request asks of a model, in whichever API it was written. Knows nothing of HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from localllm.request import Request, SamplingParams, ToolUse

Prompt = str | list[int] | list[dict[str, Any]]


class Preparing(Protocol):
    """What `Asked.prepare` needs of an LLM."""

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        tool_use: ToolUse | None = None,
    ) -> Request: ...
    def encode(
        self,
        prompt: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
        *,
        tools_unread: bool = False,
    ) -> list[int]: ...
    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Asked:
    """What one body asks of a model."""

    model: str
    prompts: tuple[Prompt, ...]
    """One, or several of a text completion: a choice each."""

    params: SamplingParams
    is_chat: bool
    tools: list[dict[str, Any]] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    echo: bool = False
    """The prompt stands before the answer, with log probabilities of its own."""

    stream: bool = False
    include_usage: bool = False

    def prepare(self, llm: Preparing) -> list[Request]:
        """One request a prompt. Raises ContextOverflow and UsageError as `LLM.prepare` does."""
        arguments = self._arguments(llm)
        return [llm.prepare(prompt, self.params, self.tools, arguments, self.tool_use) for prompt in self.prompts]

    def count(self, llm: Preparing) -> int:
        """How many tokens the prompts have, also where the context has no room for them. Raises UsageError."""
        arguments, unread = self._arguments(llm), self.tool_use.must_call
        return sum(len(llm.encode(prompt, self.tools, arguments, tools_unread=unread)) for prompt in self.prompts)

    def _arguments(self, llm: Preparing) -> dict[str, Any]:
        if not self.is_chat:
            return {}
        with_tools = self.tools is not None and not self.tool_use.must_call
        return llm.template_arguments(self.template_arguments, think=self.think, with_tools=with_tools)

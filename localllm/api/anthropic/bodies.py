"""The bodies of Anthropic's two requests, field by field."""

from typing import Any, Literal

from pydantic import Field

from localllm.api.body import Strict

# Fields that say who asks, and where a provider may keep things: what was computed is found again anyway.
WITHOUT_EFFECT = ("metadata", "service_tier", "cache_control")


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Prompt(Strict):
    """What counting and answering have in common."""

    model: str
    messages: Any
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(Prompt):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class Tool(Strict):
    """A function of the client's own."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

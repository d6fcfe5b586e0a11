"""The bodies of Anthropic's two requests, field by field."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.anthropic.messages import TextBlock, Turn
from localllm.api.body import Shown, Strict

# Fields that say who asks, and where a provider may keep things: what was computed is found again anyway.
WITHOUT_EFFECT = ("metadata", "service_tier", "cache_control")


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class AnswerFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


class OwnTool(Strict):
    """A function of the client's own."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that are taken out before a body is validated."""
    schema["properties"] |= {name: {"description": "Has no effect."} for name in WITHOUT_EFFECT}


class MessagesPrompt(Strict):
    """What counting and answering have in common."""

    model_config = ConfigDict(json_schema_extra=_others)

    model: str
    messages: Annotated[Any, Shown(list[Turn])]
    system: Annotated[Any, Shown(str | list[TextBlock] | None)] = None
    tools: Annotated[Any, Shown(list[OwnTool] | None)] = None
    tool_choice: Annotated[Any, Shown(ToolChoice | None)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(MessagesPrompt):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

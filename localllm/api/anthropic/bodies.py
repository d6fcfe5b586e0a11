"""The bodies of Anthropic's two requests, field by field."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.anthropic.messages import MessageBody, TextBlock
from localllm.api.body import SchemaType, StrictModel

# Fields that say who asks, and where a provider may keep or compute things.
NEUTRAL_FIELDS = ("metadata", "service_tier", "cache_control", "inference_geo", "betas")


class ThinkingOptions(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  # thoughts are told whole


class AnswerFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


class CustomTool(StrictModel):
    """A function of the client's own."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that are taken out before a body is validated."""
    schema["properties"] |= {name: {"description": "Has no effect."} for name in NEUTRAL_FIELDS}


class CountTokensBody(StrictModel):
    """What counting and answering have in common."""

    model_config = ConfigDict(json_schema_extra=_others)

    model: str
    messages: Annotated[Any, SchemaType(list[MessageBody])]
    system: Annotated[Any, SchemaType(str | list[TextBlock] | None)] = None
    tools: Annotated[Any, SchemaType(list[CustomTool] | None)] = None
    tool_choice: Annotated[Any, SchemaType(ToolChoice | None)] = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None  # what it was called in its beta


class MessagesBody(CountTokensBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

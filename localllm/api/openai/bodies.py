"""The bodies of OpenAI's two requests, field by field, and what is said of fields that are not here."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import BadField, SchemaType, StrictModel
from localllm.api.openai.functions import ToolList
from localllm.api.openai.messages import MessageList

# Fields that have one value here, which may be sent.
FIXED_VALUES: dict[str, Any] = {
    "modalities": ["text"],
    "verbosity": "medium",
    "store": False,
}
UNSUPPORTED_FIELDS = ("audio", "functions", "function_call", "web_search_options", "moderation")
# Fields that say who asks and where a provider may keep things; they ask nothing of the answer.
IGNORED_FIELDS = (
    *("user", "metadata", "safety_identifier", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that `supported` takes out before a body is validated."""
    without: dict[str, Any] = {name: {"description": "Has no effect."} for name in IGNORED_FIELDS}
    schema["properties"] |= without | {name: {"enum": [only, None]} for name, only in FIXED_VALUES.items()}


class SamplingBody(StrictModel):
    """What both kinds of body have."""

    model_config = ConfigDict(json_schema_extra=_others)

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Annotated[Any, SchemaType(str | list[str] | None)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class JsonSchemaFormat(StrictModel):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(SamplingBody):
    messages: MessageList
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timings_per_token: bool | None = None


class CompletionBody(SamplingBody):
    prompt: Annotated[Any, SchemaType(str | list[int] | list[str] | list[list[int]])]
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


def drop_ignored_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null or has no effect. Raises BadField for what is not supported."""
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED_FIELDS}
    for name in UNSUPPORTED_FIELDS:
        if name in fields:
            raise BadField(name, f"{name} is not supported", "leave it out")
    for name, only in FIXED_VALUES.items():
        value = fields.pop(name, only)
        if type(value) is not type(only) or value != only:
            raise BadField(name, f"{name} {value!r} is not supported", f"leave it out, or send {only!r}")
    return fields

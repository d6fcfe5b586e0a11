"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, with fields of llama.cpp, vLLM and OpenRouter,
and the fields that have no effect."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import MAX_TOOLS, SchemaType, StrictModel, check_count, drop_nulls, ignore_field, validate
from localllm.api.openai.messages import MessageList
from localllm.errors import BadField
from localllm.request import MAX_SLOTS

# Fields with a single supported value.
FIXED_VALUES: dict[str, Any] = {"modalities": ["text"]}
# Fields without effect, with the value that is the default.
WITHOUT_EFFECT: dict[str, Any] = {
    "verbosity": "medium",
    "store": False,
    "web_search_options": {},
    "moderation": {},
}
UNSUPPORTED_FIELDS = ("audio", "functions", "function_call")
# Fields about the user, caching and billing, which do not change the answer.
NEUTRAL_FIELDS = (
    *("user", "metadata", "safety_identifier", "service_tier", "client_metadata"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
    *("cache_prompt", "cache_control", "guided_decoding_backend"),
)
# Samplers of llama.cpp that are not supported, with the value that turns each off, and their settings.
SAMPLERS_OFF: dict[str, float] = {
    "typical_p": 1,
    "typ_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "dynatemp_range": 0,
    "top_n_sigma": -1,
    "adaptive_target": -1,
}
SAMPLER_SETTINGS = frozenset(
    (
        *("mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "adaptive_decay", "samplers"),
    )
)


class FunctionDefinition(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


ToolList = Annotated[Any, SchemaType(list[Tool] | None)]
"""Validated by `parse_tools`."""


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The functions, without unknown fields; None if there are none. Raises BadField."""
    if not isinstance(tools, list):
        raise BadField("tools", "tools is not a list", "send a list of functions")
    check_count(MAX_TOOLS, "tools", tools)
    return [function for index, tool in enumerate(tools) if (function := _function_tool(tool, index))] or None


def _function_tool(tool: Any, index: int) -> dict[str, Any] | None:
    tool_type = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(tool_type, str) and tool_type != "function":
        ignore_tool(tool_type, index)
        return None
    validate(Tool, tool, f"tools.{index}")
    function = {name: value for name, value in tool["function"].items() if name in FunctionDefinition.model_fields}
    return {**{name: value for name, value in tool.items() if name in Tool.model_fields}, "function": function}


def ignore_tool(tool_type: str, index: int) -> None:
    """Record a tool of an unsupported type as ignored. Raises BadField if ignored fields are refused."""
    message = f"tools of type {tool_type[:40]} are not supported"
    ignore_field(f"tools.{index}.type", message, "send functions", name=f"tools[].{tool_type}")


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis, not sent


class JsonSchemaFormat(StrictModel):
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # with json_object, as in llama.cpp


class StructuredOutputs(StrictModel):
    """Grammars as in vLLM: at most one of the fields is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def describe_ignored(schema: dict[str, Any]) -> None:
    """Add the fields that `drop_ignored_fields` removes before validation to a schema."""
    ignored: dict[str, Any] = {
        name: {"description": "Has no effect."} for name in (*NEUTRAL_FIELDS, *WITHOUT_EFFECT)
    }
    schema["properties"] |= ignored | {name: {"enum": [value, None]} for name, value in FIXED_VALUES.items()}


class SamplingBody(StrictModel):
    """Fields of both bodies."""

    model_config = ConfigDict(json_schema_extra=describe_ignored)

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    min_tokens: int | None = Field(None, ge=0)
    stop: Annotated[Any, SchemaType(str | list[str] | None)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    id_slot: int | None = Field(None, ge=-1, lt=MAX_SLOTS)
    priority: int | None = Field(None, ge=-1000, le=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class ReasoningOptions(StrictModel):
    """Reasoning options as in OpenRouter's API."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    summary: str | None = None


class ChatBody(SamplingBody):
    messages: MessageList
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timings_per_token: bool | None = None


class CompletionBody(SamplingBody):
    prompt: Annotated[Any, SchemaType(str | list[int] | list[str] | list[list[int]])]
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


def drop_neutral_samplers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without samplers that are turned off: llama.cpp's own clients send all of them."""
    return {
        name: value
        for name, value in fields.items()
        if name not in SAMPLER_SETTINGS and not (name in SAMPLERS_OFF and value == SAMPLERS_OFF[name])
    }


def drop_ignored_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null and have an effect. Raises BadField for unsupported ones."""
    fields = drop_neutral_samplers(drop_nulls(body, NEUTRAL_FIELDS))
    for name in UNSUPPORTED_FIELDS:
        if name in fields:
            raise BadField(name, f"{name} is not supported", "leave it out")
    drop_fixed_values(fields, FIXED_VALUES)
    for name, default in WITHOUT_EFFECT.items():
        if (value := fields.pop(name, default)) != default:
            message = f"{name} {str(value)[:40]!r} is not supported"
            ignore_field(name, message, changes_answer=name not in ("store", "moderation"))
    return fields


def drop_fixed_values(fields: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Remove fields whose only supported value is given. Raises BadField for another value."""
    for name, supported in values.items():
        value = fields.pop(name, supported)
        if type(value) is not type(supported) or value != supported:
            message = f"{name} {str(value)[:40]} is not supported"
            raise BadField(name, message, f"leave it out, or send {supported!r}")

"""Translates bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` into a `ParsedRequest`.

No field is ignored silently: those without effect are recorded in `body.IGNORED_FIELDS`, or refused. Defaults are
the model's recommended sampling parameters.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.anthropic.messages import MessageBody, TextBlock, parse_messages
from localllm.api.body import (
    IGNORED_FIELDS,
    MAX_TOOLS,
    SchemaType,
    StrictModel,
    check_count,
    check_stop_strings,
    drop_nulls,
    validate,
)
from localllm.api.openai.bodies import ignore_tool
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse

# Fields about the user, caching and billing, which do not change the answer.
NEUTRAL_FIELDS = ("metadata", "service_tier", "cache_control", "inference_geo", "betas")


class ThinkingOptions(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  # reasoning is returned in full


class AnswerFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


class CustomTool(StrictModel):
    """A function that the client calls."""

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


def describe_ignored(schema: dict[str, Any]) -> None:
    """Add the fields that are removed before validation to a schema."""
    schema["properties"] |= {name: {"description": "Has no effect."} for name in NEUTRAL_FIELDS}


class CountTokensBody(StrictModel):
    """Fields of both bodies."""

    model_config = ConfigDict(json_schema_extra=describe_ignored)

    model: str
    messages: Annotated[Any, SchemaType(list[MessageBody])]
    system: Annotated[Any, SchemaType(str | list[TextBlock] | None)] = None
    tools: Annotated[Any, SchemaType(list[CustomTool] | None)] = None
    tool_choice: Annotated[Any, SchemaType(ToolChoice | None)] = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None  # beta name of output_config.format


class MessagesBody(CountTokensBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


def parse_message_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages`; defaults: the model's own. Raises UsageError."""
    request = validate(MessagesBody, drop_nulls(body, NEUTRAL_FIELDS))
    check_stop_strings("stop_sequences", request.stop_sequences or [])
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.stop_sequences is not None:
        given["stop"] = tuple(request.stop_sequences)
    has_budget = request.thinking and request.thinking.budget_tokens is not None
    if has_budget and (ignored := IGNORED_FIELDS.get()) is not None:  # required by this API, so never refused
        ignored.add("thinking.budget_tokens", changes_answer=True)
    params = replace(defaults, **given, max_tokens=request.max_tokens)
    return replace(_parsed_request(request, params), stream=bool(request.stream))


def parse_count_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages/count_tokens`; defaults: as above. Raises UsageError."""
    return _parsed_request(validate(CountTokensBody, drop_nulls(body, NEUTRAL_FIELDS)), defaults)


def _parsed_request(request: CountTokensBody, params: SamplingParams) -> ParsedRequest:
    config = request.output_config
    if answer_format := (config and config.format) or request.output_format:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(answer_format.schema_))
        params = replace(params, grammar=grammar)
    tools, use = _tool_use(request)
    thinking = request.thinking.type if request.thinking else "adaptive"
    return ParsedRequest(
        request.model,
        (parse_messages(request.messages, request.system),),
        params,
        is_chat=True,
        tools=tools,
        tool_use=use,
        template_arguments={"reasoning_effort": config.effort} if config and config.effort else {},
        think={"enabled": True, "disabled": False, "adaptive": None}[thinking],
    )


def _tool_use(request: CountTokensBody) -> tuple[list[dict[str, Any]] | None, ToolUse]:
    """The functions to declare to the model, and how it may use them. With the choice `none` none is declared."""
    tools = _tools(request.tools)
    if request.tool_choice is None:
        return tools or None, ToolUse()
    if not isinstance(request.tool_choice, Mapping):
        raise BadField("tool_choice", "tool_choice is not an object", 'send {"type": "auto"}')
    choice = validate(ToolChoice, request.tool_choice, "tool_choice")
    if choice.type == "none" or (not tools and choice.type == "auto"):
        return None, ToolUse()
    if not tools:
        raise BadField("tool_choice", "tool_choice needs tools", "send tools as well")
    if (choice.type == "tool") != (choice.name is not None):
        raise BadField("tool_choice.name", "name is required for the type tool, and for no other", "send both")
    if choice.name is not None and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise BadField("tool_choice.name", f"{choice.name!r} is not in tools", "add it to tools")
    return tools, ToolUse(
        required=choice.type == "any", name=choice.name, parallel=not choice.disable_parallel_tool_use
    )


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Functions in OpenAI's format, which templates expect."""
    if tools is not None and not isinstance(tools, list):
        raise BadField("tools", "tools is not a list", "send a list of tools")
    check_count(MAX_TOOLS, "tools", tools or ())
    return [function for index, tool in enumerate(tools or ()) if (function := _tool(tool, index))]


def _tool(tool: Any, index: int) -> dict[str, Any] | None:
    """None for a tool of Anthropic's servers, which is recorded as ignored."""
    tool_type = (tool.get("type") or "custom") if isinstance(tool, Mapping) else None
    if isinstance(tool_type, str) and tool_type != "custom":
        ignore_tool(tool_type, index)
        return None
    custom = validate(CustomTool, tool if isinstance(tool, Mapping) else {}, f"tools.{index}")
    function: dict[str, Any] = {"name": custom.name, "parameters": custom.input_schema}
    if custom.description is not None:
        function["description"] = custom.description
    if custom.strict is not None:
        function["strict"] = custom.strict
    return {"type": "function", "function": function}

"""Bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` to what an LLM is asked.

Nothing is ignored in silence: what has no effect is noted in `body.IGNORED_FIELDS`, or refused. What a body leaves
out is as the model recommends. Knows nothing of HTTP.
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
    validate,
)
from localllm.api.openai.bodies import ignore_tool
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse

# The bodies of Anthropic's two requests, field by field.

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


def parse_message_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages`; defaults: the model's own. Raises UsageError."""
    asked = validate(MessagesBody, _with_effect(body))
    check_stop_strings("stop_sequences", asked.stop_sequences or [])
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if asked.stop_sequences is not None:
        given["stop"] = tuple(asked.stop_sequences)
    if (
        asked.thinking
        and asked.thinking.budget_tokens is not None
        and (ignored := IGNORED_FIELDS.get()) is not None
    ):
        ignored.add("thinking.budget_tokens", changes_answer=True)  # models think as long as they will
    params = replace(defaults, **given, max_tokens=asked.max_tokens)
    return replace(_asked(asked, params), stream=bool(asked.stream))


def parse_count_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages/count_tokens`. Raises UsageError."""
    return _asked(validate(CountTokensBody, _with_effect(body)), defaults)


def _with_effect(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None and name not in NEUTRAL_FIELDS}


def _asked(asked: CountTokensBody, params: SamplingParams) -> ParsedRequest:
    config = asked.output_config
    if form := (config and config.format) or asked.output_format:
        params = replace(params, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(form.schema_)))
    tools, use = _tool_use(asked)
    thinking = asked.thinking.type if asked.thinking else "adaptive"
    return ParsedRequest(
        asked.model,
        (parse_messages(asked.messages, asked.system),),
        params,
        is_chat=True,
        tools=tools,
        tool_use=use,
        template_arguments={"reasoning_effort": config.effort} if config and config.effort else {},
        think={"enabled": True, "disabled": False, "adaptive": None}[thinking],
    )


def _tool_use(asked: CountTokensBody) -> tuple[list[dict[str, Any]] | None, ToolUse]:
    """`none` calls no function because the model is told of none."""
    tools = _tools(asked.tools)
    if asked.tool_choice is None:
        return tools or None, ToolUse()
    if not isinstance(asked.tool_choice, Mapping):
        raise BadField("tool_choice", "tool_choice is no object", 'send {"type": "auto"}')
    choice = validate(ToolChoice, asked.tool_choice, "tool_choice")
    if choice.type == "none":
        return None, ToolUse()
    if not tools and choice.type == "auto":
        return None, ToolUse()
    if not tools:
        raise BadField("tool_choice", "there is a tool_choice and there are no tools", "send tools, too")
    if (choice.type == "tool") != (choice.name is not None):
        raise BadField("tool_choice.name", "a name goes with the type tool, and with no other", "send both")
    if choice.name is not None and choice.name not in {tool["function"]["name"] for tool in tools}:
        raise BadField("tool_choice.name", f"{choice.name!r} is not among the tools", "send it, too")
    return tools, ToolUse(
        required=choice.type == "any", name=choice.name, parallel=not choice.disable_parallel_tool_use
    )


def _tools(tools: Any) -> list[dict[str, Any]]:
    """In OpenAI's form, which templates know."""
    if tools is not None and not isinstance(tools, list):
        raise BadField("tools", "tools is no list", "send a list of tools")
    check_count(MAX_TOOLS, "tools", tools or ())
    return [function for index, tool in enumerate(tools or ()) if (function := _tool(tool, index))]


def _tool(tool: Any, index: int) -> dict[str, Any] | None:
    """None for a tool of Anthropic's own, which is noted."""
    kind = (tool.get("type") or "custom") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "custom":
        ignore_tool(kind, index)
        return None
    found = validate(CustomTool, tool if isinstance(tool, Mapping) else {}, f"tools.{index}")
    function: dict[str, Any] = {"name": found.name, "parameters": found.input_schema}
    if found.description is not None:
        function["description"] = found.description
    if found.strict is not None:
        function["strict"] = found.strict
    return {"type": "function", "function": function}

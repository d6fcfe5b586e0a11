"""Bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` to what an LLM is asked.

Nothing is ignored in silence, but for the budget of thoughts: models think as long as they will. What a body
leaves out is as the model recommends. Knows nothing of HTTP.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm.api import limits
from localllm.api.anthropic.bodies import IGNORED_FIELDS, CountTokensBody, CustomTool, MessagesBody, ToolChoice
from localllm.api.anthropic.messages import parse_messages
from localllm.api.asked import ParsedRequest
from localllm.api.body import BadField, validate
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse


def parse_message_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages`; defaults: the model's own. Raises UsageError."""
    asked = validate(MessagesBody, _with_effect(body))
    limits.check_stop_strings("stop_sequences", asked.stop_sequences or [])
    names = ("temperature", "top_p", "top_k")
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    params = replace(defaults, **given, max_tokens=asked.max_tokens, stop=tuple(asked.stop_sequences or ()))
    return replace(_asked(asked, params), stream=bool(asked.stream))


def parse_count_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/messages/count_tokens`. Raises UsageError."""
    return _asked(validate(CountTokensBody, _with_effect(body)), defaults)


def _with_effect(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None and name not in IGNORED_FIELDS}


def _asked(asked: CountTokensBody, params: SamplingParams) -> ParsedRequest:
    config = asked.output_config
    if config and config.format:
        params = replace(params, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(config.format.schema_)))
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
    limits.check_count(limits.MAX_TOOLS, "tools", tools or ())
    return [_tool(tool, f"tools.{place}") for place, tool in enumerate(tools or ())]


def _tool(tool: Any, at: str) -> dict[str, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind != "custom":
        raise BadField(f"{at}.type", f"tools of type {kind} are not supported", "send tools of your own")
    found = validate(CustomTool, tool if isinstance(tool, Mapping) else {}, at)
    function: dict[str, Any] = {"name": found.name, "parameters": found.input_schema}
    if found.description is not None:
        function["description"] = found.description
    if found.strict is not None:
        function["strict"] = found.strict
    return {"type": "function", "function": function}

"""Translates bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens` into a `ParsedRequest`.

No field is ignored silently: those without effect are recorded in `body.IGNORED_FIELDS`, or refused. Defaults are
the model's recommended sampling parameters.

Templates expect one text per message, an assistant's reasoning and tool calls, and one message per tool result. So
the texts of a message are joined by an empty line, and so are consecutive messages of one role. A tool result that
is an error starts with "Error: ", as templates have no field for it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import (
    IGNORED_FIELDS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    SchemaType,
    StrictModel,
    check_count,
    check_stop_strings,
    drop_nulls,
    ignore_field,
    validate,
)
from localllm.api.openai.bodies import ignore_tool
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse

Message = dict[str, Any]
TEXT_SEPARATOR = "\n\n"
# Fields about the user, caching and billing, which do not change the answer.
NEUTRAL_FIELDS = ("metadata", "service_tier", "cache_control", "inference_geo", "betas")


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = ""
    cache_control: Any = None


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageBody(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, SchemaType(str | list[Block])]


# Blocks that Anthropic's servers add, and that other models cannot read.
SERVER_BLOCK_TYPES = re.compile(
    r"redacted_thinking|server_tool_use|mcp_tool_use|container_upload|compaction|fallback|\w+_tool_result"
)
BLOCK_TYPES: dict[str, dict[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


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


def parse_messages(messages: Any, system: Any) -> list[Message]:
    """Chat messages. Raises BadField for a malformed conversation, unsupported blocks, and a tool result without a
    call."""
    if not isinstance(messages, list) or not messages:
        raise BadField("messages", "messages is not a non-empty list", "send at least one message")
    check_count(MAX_MESSAGES, "messages", messages)
    chat = [] if system is None else _system_messages(parse_blocks(system, "system", "system"))
    function_names: dict[str, str] = {}  # by call id
    last_role = ""
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not isinstance(message, Mapping):
            raise BadField(path, f"{path} is not a message", 'send {"role": ..., "content": ...}')
        body = validate(MessageBody, message, path)
        blocks = parse_blocks(body.content, body.role, f"{path}.content")
        new = TRANSLATORS[body.role](blocks, function_names, path)
        if body.role == last_role and new and chat[-1]["role"] == new[0]["role"] != "tool":
            chat[-1] = _merge_messages(chat[-1], new.pop(0))
        chat += new
        last_role = body.role
    if last_role == "system":
        raise BadField(
            f"messages.{len(messages) - 1}", "the last message is a system message", "send a user message"
        )
    if last_role == "assistant":  # the answer continues it
        chat[-1]["prefix"] = True
    return chat


def parse_blocks(content: Any, role: str, path: str) -> list[Block]:
    """Validated blocks; a string is one text block. Raises BadField."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)] if content else []
    if not isinstance(content, list):
        raise BadField(path, f"{path} is neither a string nor a list of blocks", "send one of them")
    check_count(MAX_PARTS, path, content)
    return [
        parsed for index, block in enumerate(content) if (parsed := _parse_block(block, role, f"{path}.{index}"))
    ]


def _parse_block(block: Any, role: str, path: str) -> Block | None:
    """None for a block of Anthropic's servers, which is recorded as ignored."""
    block_type = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block_type, str):
        raise BadField(path, f"{path} is not a block", 'send {"type": "text", "text": ...}')
    if block_type in BLOCK_TYPES[role]:
        return validate(BLOCK_TYPES[role][block_type], block, path)
    message = f"blocks of type {block_type} are not supported here"
    if role == "assistant" and SERVER_BLOCK_TYPES.fullmatch(block_type):
        ignore_field(f"{path}.type", message, name=f"messages[].content[].{block_type}")
        return None
    raise BadField(f"{path}.type", message, f"send {', '.join(BLOCK_TYPES[role])}")


def _text(blocks: list[Block]) -> str:
    return TEXT_SEPARATOR.join(block.text for block in blocks if isinstance(block, TextBlock) and block.text)


def _system_messages(blocks: list[Block], *_: Any) -> list[Message]:
    text = _text(blocks)
    return [{"role": "system", "content": text}] if text else []


def _user_messages(blocks: list[Block], function_names: Mapping[str, str], path: str) -> list[Message]:
    """Tool results first, then the user's text."""
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            at = f"{path}.content.{index}"
            name = function_names.get(block.tool_use_id)
            if name is None:
                raise BadField(
                    f"{at}.tool_use_id", f"{at} belongs to no earlier tool_use", "send the tool_use as well"
                )
            text = _text(parse_blocks(block.content or "", "system", f"{at}.content"))
            text = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})
    text = _text(blocks)
    return [*messages, *([{"role": "user", "content": text}] if text or not messages else [])]


def _assistant_messages(blocks: list[Block], function_names: dict[str, str], _: str) -> list[Message]:
    """One message with text, reasoning and tool calls, whose function names are added to `function_names`."""
    reasoning = TEXT_SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    function_names |= {use.id: use.name for use in uses}
    message: Message = {"role": "assistant", "content": _text(blocks) or (None if uses else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if uses:
        message["tool_calls"] = [_tool_call(use) for use in uses]
    return [message]


def _tool_call(use: ToolUseBlock) -> Message:
    arguments = json.dumps(use.input, ensure_ascii=False)
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": arguments}}


def _merge_messages(first: Message, second: Message) -> Message:
    texts = [text for text in (first["content"], second["content"]) if text]
    merged = {**first, **second, "content": TEXT_SEPARATOR.join(texts) or first["content"]}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


TRANSLATORS = {"system": _system_messages, "user": _user_messages, "assistant": _assistant_messages}

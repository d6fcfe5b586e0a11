"""Translates bodies of `/v1/responses` into a `ParsedRequest`, by way of the equivalent chat body.

A model's turn is several input items here (reasoning, message, tool calls), but one chat message.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import (
    MAX_MESSAGES,
    SchemaType,
    StrictModel,
    check_count,
    drop_nulls,
    ignore_field,
    validate,
)
from localllm.api.openai.bodies import NEUTRAL_FIELDS, drop_fixed_values
from localllm.api.openai.messages import join_text
from localllm.api.openai.requests import parse_chat_request
from localllm.api.openai.responses_api.tools import (
    LOCAL_SHELL,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    NamespaceTool,
    declare_tools,
    joined_name,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField
from localllm.request import SamplingParams

IGNORED_RESPONSE_FIELDS = tuple(name for name in NEUTRAL_FIELDS if name != "metadata")  # metadata is echoed
# Fields with a single supported value.
FIXED_VALUES: dict[str, Any] = {"background": False}
# Refused fields, with a remedy.
UNSUPPORTED_FIELDS = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send its text as instructions and input",
}
# Fields without effect, with a remedy.
WITHOUT_EFFECT = {
    "context_management": "leave it out",
    "max_tool_calls": "leave it out: the client calls the tools",
    "moderation": "leave it out",
    "image": "leave it out",
    "access_programs": "leave it out",
    "background_options": "leave it out",
}
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

Message = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(StrictModel):
    type: str = "message"
    id: str | None = None
    status: Status | None = None


class TextPartItem(StrictModel):
    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: Any = None


TextContent = Annotated[Any, SchemaType(str | list[TextPartItem] | None)]


class MessageItem(Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(Item):
    call_id: str
    output: TextContent


class CustomToolCallItem(Item):
    call_id: str
    name: str
    input: str


class LocalShellCallItem(Item):
    call_id: str
    action: dict[str, Any]


class LocalShellOutputItem(Item):
    call_id: str | None = None  # may be in `id` instead
    output: TextContent


class ReasoningItem(Item):
    summary: TextContent = None
    content: TextContent = None
    encrypted_content: str | None = None  # readable only by the server that made it


ITEM_TYPES: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "local_shell_call": LocalShellCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "reasoning": ReasoningItem,
}
# Items of tools that only other servers have.
FOREIGN_ITEM = re.compile(
    r"\w+_call(_output)?|mcp_\w+|compaction\w*|ghost_snapshot|tool_search\w*|other|additional_\w+"
)
TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ReasoningOptions(StrictModel):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # reasoning is returned in full, as `content`
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None  # padding against traffic analysis, not sent


def describe_ignored(schema: dict[str, Any]) -> None:
    """Add the fields that are removed before validation to a schema."""
    ignored: dict[str, Any] = {
        name: {"description": "Has no effect."} for name in (*IGNORED_RESPONSE_FIELDS, *WITHOUT_EFFECT)
    }
    schema["properties"] |= ignored | {name: {"enum": [value, None]} for name, value in FIXED_VALUES.items()}


class ResponseBody(StrictModel):
    model_config = ConfigDict(json_schema_extra=describe_ignored)

    model: str
    input: Annotated[
        Any, SchemaType(str | list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem])
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Any, SchemaType(list[FunctionTool | CustomTool | LocalShellTool | NamespaceTool] | None)] = (
        None
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None  # a prompt that is too long is refused either way
    priority: int | None = Field(None, ge=-1000, le=1000)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None


SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "parallel_tool_calls",
)
SHARED_FIELDS += ("chat_template_kwargs", "priority", "stream")
# Names of chat fields in this API, for errors.
RESPONSE_FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def parse_response_body(body: Mapping[str, Any]) -> ResponseBody:
    """Validate a body. Raises BadField for unknown and unsupported fields, and wrong types."""
    fields = drop_nulls(body, IGNORED_RESPONSE_FIELDS)
    for name, remedy in UNSUPPORTED_FIELDS.items():
        if name in fields:
            raise BadField(name, f"{name} is not supported", remedy)
    drop_fixed_values(fields, FIXED_VALUES)
    for name, remedy in WITHOUT_EFFECT.items():
        if fields.pop(name, None):
            ignore_field(name, f"{name} is not supported", remedy)
    request = validate(ResponseBody, fields)
    for item in request.include or ():
        if item not in INCLUDED:
            message, remedy = f"{item[:80]} cannot be included", f"send {' or '.join(INCLUDED)}"
            ignore_field("include", message, remedy, name=f"include.{item}", changes_answer=False)
    if request.text and request.text.verbosity not in (None, "medium"):
        ignore_field("text.verbosity", f"verbosity {request.text.verbosity} is not supported")
    return request


def parse_response_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/responses`; defaults: the model's own. Raises UsageError."""
    try:
        return parse_chat_request(_chat_body(parse_response_body(body)), defaults)
    except BadField as error:
        first, _, rest = error.param.partition(".")
        param = ".".join(filter(None, (RESPONSE_FIELD_NAMES.get(first, first), rest)))
        raise BadField(param, error.message, error.remedy) from None


def _chat_body(request: ResponseBody) -> dict[str, Any]:
    with_logprobs = request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or ())
    return {name: getattr(request, name) for name in SHARED_FIELDS} | {
        "messages": messages_from_input(request.input, request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": with_logprobs or None,
        "top_logprobs": request.top_logprobs,
        "response_format": _format(request.text.format) if request.text and request.text.format else None,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "tools": None
        if request.tools is None
        else [{"type": "function", "function": tool.function} for tool in declare_tools(request.tools)],
        "tool_choice": _choice(request.tool_choice),
    }


def _format(request: TextFormat) -> dict[str, Any]:
    if request.type != "json_schema":
        return {"type": request.type}
    json_schema = {"name": request.name, "schema": request.schema_, "description": request.description}
    json_schema["strict"] = request.strict
    return {"type": request.type, "json_schema": drop_nulls(json_schema)}


def _choice(choice: Any) -> Any:
    """A tool_choice in the chat format, where the function's name is in an object of its own."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") in ("function", "custom") and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == LOCAL_SHELL:
        return {"type": "function", "function": {"name": LOCAL_SHELL}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        fields = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": fields | {"tools": list(map(_choice, choice["tools"]))}}
    return choice


def messages_from_input(input: Any, instructions: str | None) -> list[Message]:
    """Messages of a text or a list of items. Raises BadField for anything else, and for unknown item types."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(input, str):
        return [*messages, {"role": "user", "content": input}]
    if not isinstance(input, list) or not input:
        raise BadField("input", "input is neither a string nor a non-empty list", "send one of them")
    check_count(MAX_MESSAGES, "input", input)
    for index, item in enumerate(input):
        _add_item(messages, item, f"input.{index}")
    return messages


def _add_item(messages: list[Message], item: Any, path: str) -> None:
    item_type = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item_type, str) or item_type not in ITEM_TYPES:
        message, remedy = f"{path} has the type {str(item_type)[:40]}", f"send one of {', '.join(ITEM_TYPES)}"
        if isinstance(item_type, str) and FOREIGN_ITEM.fullmatch(item_type):
            ignore_field(f"{path}.type", message, remedy, name=f"input[].{item_type}")
            return
        raise BadField(f"{path}.type", message, remedy)
    match validate(ITEM_TYPES[item_type], drop_nulls(item), path):
        case MessageItem(role="assistant", content=content):
            _assistant_turn(messages, "content")["content"] = _text(content, f"{path}.content")
        case MessageItem(role=role, content=content):
            messages.append({"role": role, "content": _text(content, f"{path}.content")})
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments, namespace=namespace):
            _add_call(messages, call_id, joined_name(namespace, name), arguments)
        case CustomToolCallItem(call_id=call_id, name=name, input=text):
            _add_call(messages, call_id, name, json.dumps({"input": text}, ensure_ascii=False))
        case LocalShellCallItem(call_id=call_id, action=action):
            names = ("command", "working_directory", "timeout_ms")
            arguments = {name: action[name] for name in names if action.get(name) is not None}
            _add_call(messages, call_id, LOCAL_SHELL, json.dumps(arguments, ensure_ascii=False))
        case LocalShellOutputItem(call_id=call_id, id=id, output=output):
            text = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id or id or "", "content": text})
        case FunctionCallOutputItem(call_id=call_id, output=output):
            text = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case ReasoningItem(summary=summary, content=content):
            text = _text(content or summary or [], f"{path}.content")
            _assistant_turn(messages, "reasoning_content")["reasoning_content"] = text


def _add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant_turn(messages).setdefault("tool_calls", []).append(call)


def _assistant_turn(messages: list[Message], field: str = "") -> Message:
    """The assistant message that an item belongs to: the last message, or a new one if the last has another role,
    or, given a field to set, already has it or a tool call."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (field and (last.get(field) is not None or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, path: str) -> str:
    return join_text(content, path, TextPartItem, TEXT_PART_TYPES)

"""Bodies of `/v1/responses` to what an LLM is asked, by way of the chat body that asks for the same.

Knows nothing of HTTP, nor of responses that are kept.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import SchemaType, StrictModel, ignore_field, validate
from localllm.api.openai.bodies import NEUTRAL_FIELDS
from localllm.api.openai.requests import parse_chat_request
from localllm.api.openai.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    messages_from_input,
)
from localllm.api.openai.responses_api.tools import (
    LOCAL_SHELL,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    NamespaceTool,
    declare_tools,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField
from localllm.request import SamplingParams

# The body of `/v1/responses`, field by field, and what is said of fields that are not here.

IGNORED_RESPONSE_FIELDS = tuple(name for name in NEUTRAL_FIELDS if name != "metadata")  # which is told again
# Fields that have one value here, which may be sent.
FIXED_VALUES: dict[str, Any] = {"background": False}
# Refused, with what to do instead.
UNSUPPORTED_FIELDS = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send its text as instructions and input",
}
# Fields that have no effect, with what to do instead.
WITHOUT_EFFECT = {
    "context_management": "leave it out",
    "max_tool_calls": "leave it out: tools are called by whoever asks",
    "moderation": "leave it out",
    "image": "leave it out",
    "access_programs": "leave it out",
    "background_options": "leave it out",
}
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")


class ReasoningOptions(StrictModel):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # thoughts are told whole, as `content`
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
    include_obfuscation: bool | None = None  # padding against those who count bytes, which is not sent


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that are taken out before a body is validated."""
    without: dict[str, Any] = {
        name: {"description": "Has no effect."} for name in (*IGNORED_RESPONSE_FIELDS, *WITHOUT_EFFECT)
    }
    schema["properties"] |= without | {name: {"enum": [only, None]} for name, only in FIXED_VALUES.items()}


class ResponseBody(StrictModel):
    model_config = ConfigDict(json_schema_extra=_others)

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
    truncation: Literal["auto", "disabled"] | None = None  # a prompt that is too long is refused, whatever it says
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
# Fields of the chat body, as whoever asked has called them.
RESPONSE_FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def parse_response_body(body: Mapping[str, Any]) -> ResponseBody:
    """Raises BadField for what is unknown, of a wrong type or not supported."""
    fields = {
        name: value for name, value in body.items() if value is not None and name not in IGNORED_RESPONSE_FIELDS
    }
    for name, remedy in UNSUPPORTED_FIELDS.items():
        if name in fields:
            raise BadField(name, f"{name} is not supported", remedy)
    for name, only in FIXED_VALUES.items():
        value = fields.pop(name, only)
        if type(value) is not type(only) or value != only:
            raise BadField(name, f"{name} {str(value)[:40]} is not supported", f"leave it out, or send {only!r}")
    for name, remedy in WITHOUT_EFFECT.items():
        if fields.pop(name, None):
            ignore_field(name, f"{name} is not supported", remedy)
    asked = validate(ResponseBody, fields)
    for wanted in asked.include or ():
        if wanted not in INCLUDED:
            message = f"{wanted[:80]} cannot be included"
            ignore_field(
                "include", message, f"send {' or '.join(INCLUDED)}", name=f"include.{wanted}", changes_answer=False
            )
    if asked.text and asked.text.verbosity not in (None, "medium"):
        ignore_field("text.verbosity", f"verbosity {asked.text.verbosity} is not supported")
    return asked


def parse_response_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/responses`; defaults: the model's own. Raises UsageError."""
    try:
        return parse_chat_request(_chat_body(parse_response_body(body)), defaults)
    except BadField as error:
        first, _, rest = error.param.partition(".")
        param = ".".join(filter(None, (RESPONSE_FIELD_NAMES.get(first, first), rest)))
        raise BadField(param, error.message, error.remedy) from None


def _chat_body(asked: ResponseBody) -> dict[str, Any]:
    wanted = asked.top_logprobs is not None or "message.output_text.logprobs" in (asked.include or ())
    return {name: getattr(asked, name) for name in SHARED_FIELDS} | {
        "messages": messages_from_input(asked.input, asked.instructions),
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": wanted or None,
        "top_logprobs": asked.top_logprobs,
        "response_format": _format(asked.text.format) if asked.text and asked.text.format else None,
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
        "tools": None
        if asked.tools is None
        else [{"type": "function", "function": tool.function} for tool in declare_tools(asked.tools)],
        "tool_choice": _choice(asked.tool_choice),
    }


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    described = {"name": asked.name, "schema": asked.schema_, "description": asked.description}
    described["strict"] = asked.strict
    return {"type": asked.type, "json_schema": {k: value for k, value in described.items() if value is not None}}


def _choice(choice: Any) -> Any:
    """Functions are named flat here, and in objects of their own in a chat's body."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") in ("function", "custom") and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == LOCAL_SHELL:
        return {"type": "function", "function": {"name": LOCAL_SHELL}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        named = {name: value for name, value in choice.items() if name != "type"}
        return {"type": "allowed_tools", "allowed_tools": named | {"tools": list(map(_choice, choice["tools"]))}}
    return choice

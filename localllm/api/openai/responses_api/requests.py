"""Bodies of `/v1/responses` to what an LLM is asked, by way of the chat body that asks for the same.

Knows nothing of HTTP, nor of responses that are kept.
"""

from collections.abc import Mapping
from typing import Any

from localllm.api.asked import ParsedRequest
from localllm.api.body import ignore_field, validate
from localllm.api.openai.requests import parse_chat_request
from localllm.api.openai.responses_api.bodies import (
    FIXED_VALUES,
    IGNORED_RESPONSE_FIELDS,
    INCLUDED,
    UNSUPPORTED_FIELDS,
    WITHOUT_EFFECT,
    ResponseBody,
    TextFormat,
)
from localllm.api.openai.responses_api.items import messages_from_input
from localllm.api.openai.responses_api.tools import LOCAL_SHELL, declare_tools
from localllm.errors import BadField
from localllm.request import SamplingParams

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

"""Bodies of localllm's own client. Sampling parameters are complete, in the JSON format of saved chats and
receipts."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from localllm.api.body import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_IDS,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TOOLS,
    StrictModel,
    check_count,
    check_stop_strings,
    validate,
)
from localllm.api.openai.messages import MessageList
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField, UsageError
from localllm.request import SamplingParams
from localllm.sampling import params_from_json

MAX_STATE_TOKENS = 2**20


class OpenBody(StrictModel):
    """The model to open, by name, or by the path of a loaded model."""

    model: str | None = None
    path: str | None = None
    load: bool = False


class NameBody(StrictModel):
    model: str


class ArgumentsBody(StrictModel):
    model: str
    given: dict[str, Any]
    think: bool | None
    with_tools: bool


class StateBody(StrictModel):
    """The conversation whose KV cache contents to send, if the query names no slot."""

    model: str | None = None
    tokens: list[int] | None = Field(None, max_length=MAX_STATE_TOKENS)
    prompt: str | None = None
    messages: MessageList | None = None


class AnswerBody(StrictModel):
    model: str
    prompt: str | list[int] | list[dict[str, Any]]
    params: dict[str, Any]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]
    think: bool | None = None
    inspect: int | None = None


def parse_answer_request(body: Mapping[str, Any]) -> ParsedRequest:
    """A body of `/localllm/answer`. Raises UsageError."""
    request = validate(AnswerBody, body)
    prompt: Any = request.prompt
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if is_chat:
        check_count(MAX_MESSAGES, "prompt", prompt)
    check_count(MAX_TOOLS, "tools", request.tools or ())
    check_count(MAX_TEMPLATE_ARGUMENTS, "template_arguments", request.template_arguments)
    return ParsedRequest(
        request.model,
        (prompt,),
        _params(request.params),
        is_chat=is_chat,
        tools=request.tools,
        template_arguments=request.template_arguments,
        think=request.think,
        stream=True,
        inspect=request.inspect,
    )


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    try:
        params = params_from_json(fields)
    except UsageError as error:
        raise BadField("params", error.message, error.remedy) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadField("params", f"params is malformed ({error!r})", "use a client of this version") from None
    check_stop_strings("params.stop", list(params.stop))
    check_count(MAX_STOP_IDS, "params.stop_ids", params.stop_ids)
    check_count(MAX_LOGIT_BIASES, "params.logit_bias", params.logit_bias)
    return params

"""Bodies of localllm's own client to what an LLM is asked. Nothing is read between the lines: parameters come
whole, as saved chats and receipts have them. Knows nothing of HTTP."""

from collections.abc import Mapping
from typing import Any

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
from localllm.api.parsed_request import ParsedRequest
from localllm.errors import BadField, UsageError
from localllm.request import SamplingParams
from localllm.sampling import params_from_json


class OpenBody(StrictModel):
    """Which model is meant: by a name, or by where it lies, which names one that is loaded and no other."""

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


class AnswerBody(StrictModel):
    model: str
    prompt: str | list[int] | list[dict[str, Any]]
    params: dict[str, Any]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]
    think: bool | None = None
    inspect: int | None = None


def parse_answer_request(body: Mapping[str, Any]) -> ParsedRequest:
    """Raises UsageError."""
    asked = validate(AnswerBody, body)
    prompt: Any = asked.prompt
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    if is_chat:
        check_count(MAX_MESSAGES, "prompt", prompt)
    check_count(MAX_TOOLS, "tools", asked.tools or ())
    check_count(MAX_TEMPLATE_ARGUMENTS, "template_arguments", asked.template_arguments)
    return ParsedRequest(
        asked.model,
        (prompt,),
        _params(asked.params),
        is_chat=is_chat,
        tools=asked.tools,
        template_arguments=asked.template_arguments,
        think=asked.think,
        stream=True,
        inspect=asked.inspect,
    )


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    try:
        params = params_from_json(fields)
    except UsageError as error:
        raise BadField("params", error.message, error.remedy) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadField("params", f"these are no parameters ({error!r})", "use a client of this version") from None
    check_stop_strings("params.stop", list(params.stop))
    check_count(MAX_STOP_IDS, "params.stop_ids", params.stop_ids)
    check_count(MAX_LOGIT_BIASES, "params.logit_bias", params.logit_bias)
    return params

"""The body of `/v1/responses`, field by field, and what is said of fields that are not here."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import SchemaType, StrictModel
from localllm.api.openai.bodies import IGNORED_FIELDS
from localllm.api.openai.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
)

IGNORED_RESPONSE_FIELDS = tuple(name for name in IGNORED_FIELDS if name != "metadata")  # which is told again
STATELESS_REMEDY = "nothing is kept: send the whole conversation as input"
# Fields that have one value here, which may be sent.
FIXED_VALUES: dict[str, Any] = {"background": False, "store": False, "truncation": "disabled"}
FIXED_VALUE_REMEDIES = {"store": "leave it out, or send False; " + STATELESS_REMEDY}
# Refused, with what to do instead.
UNSUPPORTED_FIELDS = {
    "previous_response_id": STATELESS_REMEDY,
    "conversation": STATELESS_REMEDY,
    "prompt": "send its text as instructions and input",
    "context_management": "leave it out",
    "max_tool_calls": "leave it out: tools are called by whoever asks",
    "moderation": "leave it out",
    "image": "leave it out",
    "access_programs": "leave it out",
    "background_options": "leave it out",
}


class ReasoningOptions(StrictModel):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # thoughts are told whole, as `content`
    generate_summary: Literal["auto"] | None = None


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None


class ResponseTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that are taken out before a body is validated."""
    without: dict[str, Any] = {name: {"description": "Has no effect."} for name in IGNORED_RESPONSE_FIELDS}
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
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Any, SchemaType(list[ResponseTool] | None)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

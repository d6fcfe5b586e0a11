"""The body of `/v1/responses`, field by field, and what is said of fields that are not here."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import SchemaType, StrictModel
from localllm.api.openai.bodies import NEUTRAL_FIELDS
from localllm.api.openai.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
)
from localllm.api.openai.responses_api.tools import CustomTool, FunctionTool, LocalShellTool, NamespaceTool

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

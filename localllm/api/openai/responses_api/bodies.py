"""The body of `/v1/responses`, field by field, and what is said of fields that are not here."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from localllm.api.body import Shown, Strict
from localllm.api.openai.bodies import WITHOUT_EFFECT
from localllm.api.openai.responses_api.items import Called, Returned, Said, Thought

UNUSED = tuple(name for name in WITHOUT_EFFECT if name != "metadata")  # which is told again
STATELESS = "nothing is kept: send the whole conversation as input"
# Fields that have one value here, which may be sent.
ONLY: dict[str, Any] = {"background": False, "store": False, "truncation": "disabled"}
REMEDIES = {"store": "leave it out, or send False; " + STATELESS}
# Refused, with what to do instead.
REFUSED = {
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": "send its text as instructions and input",
    "context_management": "leave it out",
    "max_tool_calls": "leave it out: tools are called by whoever asks",
    "moderation": "leave it out",
    "image": "leave it out",
    "access_programs": "leave it out",
    "background_options": "leave it out",
}


class Reasoning(Strict):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # thoughts are told whole, as `content`
    generate_summary: Literal["auto"] | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class Tool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _others(schema: dict[str, Any]) -> None:
    """Describe the fields that are taken out before a body is validated."""
    without: dict[str, Any] = {name: {"description": "Has no effect."} for name in UNUSED}
    schema["properties"] |= without | {name: {"enum": [only, None]} for name, only in ONLY.items()}


class ResponseBody(Strict):
    model_config = ConfigDict(json_schema_extra=_others)

    model: str
    input: Annotated[Any, Shown(str | list[Said | Called | Returned | Thought])]
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
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[Any, Shown(list[Tool] | None)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

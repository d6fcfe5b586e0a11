"""Bodies of `/api/generate` and `/api/chat` to what an LLM is asked. Knows nothing of HTTP.

Where options say nothing, the model's own recommendation counts, with an edition's parameters before it; a model
that recommends nothing is drawn from as Ollama documents. A prompt that is too long is refused, never cut:
`truncate` and `shift` change nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from localllm.api.body import (
    IGNORED_FIELDS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    StrictModel,
    check_count,
    check_stop_strings,
    ignore_field,
    validate,
)
from localllm.api.ollama.bodies import (
    ChatBody,
    CommonBody,
    GenerateBody,
    gather_options,
    parse_body,
    parse_keep_alive,
)
from localllm.api.openai.bodies import ignore_tool
from localllm.api.openai.requests import parse_tool_use
from localllm.errors import BadField, DamagedModel, UsageError
from localllm.modelfile.edition import Edition
from localllm.modelfile.options import NEUTRAL, OPTION_TYPES, check_options, to_sampling_params
from localllm.request import ChatRequest, Grammar, GrammarKind, Prompt, Request, SamplingParams, ToolUse
from localllm.text.infill import encode_infill, find_infill_tokens, infill_end_ids

# The messages and tools of Ollama's chat body, checked field by field, as chat templates want them.

ROLES = ("system", "user", "assistant", "tool")
TEXT_ONLY_REMEDY = "this server reads text alone"


class FunctionCall(StrictModel):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class ToolCallPart(StrictModel):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(StrictModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # of the tool that answers, as Ollama had it once
    id: str | None = None  # of the message, which some clients number


class FunctionDefinition(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: str | None = None
    function: FunctionDefinition
    items: Any = None


def parse_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Raises BadField for a field that is unknown or of another type, for pictures, and a role that is none."""
    check_count(MAX_MESSAGES, "messages", messages)
    read: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # name and id of calls that nothing answers yet
    for place, message in enumerate(messages):
        at = f"messages.{place}"
        if not isinstance(message, Mapping):
            raise BadField(at, f"{at} is no object", "send a role and a content")
        said = validate(ChatMessage, message, at)
        role = said.role.lower()
        if role not in ROLES:
            raise BadField(f"{at}.role", f"invalid role: {said.role[:40]}, must be one of [{' '.join(ROLES)}]")
        if said.images:
            raise BadField(f"{at}.images", f"{at} has images", TEXT_ONLY_REMEDY)
        if role == "tool" and said.tool_name is None and said.name:
            said = said.model_copy(update={"tool_name": said.name})
        found: dict[str, Any] = {"role": role, "content": said.content or ""}
        if role == "assistant" and said.thinking:
            found["reasoning_content"] = said.thinking
        if role == "assistant" and said.tool_calls:
            found["tool_calls"] = [_call(call, len(waiting) + index) for index, call in enumerate(said.tool_calls)]
            waiting += [(call["function"]["name"], call["id"]) for call in found["tool_calls"]]
        if role == "tool":
            found |= _answered(said, waiting)
        read.append(found)
    return read


def _call(call: ToolCallPart, number: int) -> dict[str, Any]:
    """Ollama's clients name no calls; some templates want each to have a name of nine letters."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or f"call{number:05}", "type": "function", "function": function}


def _answered(said: ChatMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call this is the answer to: the one that is named, else the first of that function."""
    mine = next(
        (call for call in waiting if said.tool_call_id in (None, call[1]) and said.tool_name in (None, call[0])),
        None,
    )
    if mine:
        waiting.remove(mine)
    name, number = mine or (said.tool_name, said.tool_call_id)
    told = {"name": said.tool_name or name, "tool_call_id": said.tool_call_id or number}
    return {key: value for key, value in told.items() if value}


def parse_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Functions as templates want them; None where there are none. Raises BadField."""
    check_count(MAX_TOOLS, "tools", tools or ())
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(tools or ()):
        at = f"tools.{place}"
        if not isinstance(tool, Mapping):
            raise BadField(at, f"{at} is no object", "send a type and a function")
        kind = tool.get("type")
        if isinstance(kind, str) and kind not in ("", "function"):
            ignore_tool(kind, place)
            continue
        validate(Tool, tool, at)
        known = FunctionDefinition.model_fields
        function = {key: value for key, value in tool["function"].items() if value is not None and key in known}
        found.append({"type": "function", "function": function})
    return found or None


OLLAMA_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class OllamaModel(Protocol):
    """What is needed of an LLM."""

    edition: Edition | None
    recommended: SamplingParams
    tokenizer: Any

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def thinks(self) -> bool: ...
    def with_edition(self, edition: Edition) -> Any: ...
    def prepare(self, chat: ChatRequest) -> Request: ...
    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class OllamaRequest:
    """What a body asks, in either shape."""

    model: str
    stream: bool
    keep_alive: float | None  # seconds; None: as ever
    options: Mapping[str, Any]
    grammar: Grammar | None
    think: bool | str | None
    logprobs: int | None

    @property
    def num_ctx(self) -> int | None:
        """Tokens of prompt and answer."""
        return self.options.get("num_ctx")

    def sampling_params(self, llm: OllamaModel) -> SamplingParams:
        own = llm.edition.parameters if llm.edition else {}
        options = {**own, **self.options}
        return replace(
            to_sampling_params(options, with_ollama_defaults(llm.recommended)),
            grammar=self.grammar,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True)
class OllamaChat(OllamaRequest):
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)

    @property
    def is_load_only(self) -> bool:
        return not self.messages

    def prepare(self, llm: OllamaModel) -> tuple[Any, Request]:
        """What answers, and the request. Raises ContextOverflow and UsageError as `LLM.prepare` does."""
        with_tools = self.tools is not None and not self.tool_use.must_call
        arguments = thinking_arguments(llm, self, with_tools=with_tools)
        chat = ChatRequest(
            self.messages,
            self.sampling_params(llm),
            self.tools,
            arguments,
            tool_use=self.tool_use,
            context=self.num_ctx,
        )
        return llm, llm.prepare(chat)


@dataclass(frozen=True)
class OllamaGenerate(OllamaRequest):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context_ids: tuple[int, ...] = ()
    raw: bool = False

    @property
    def is_load_only(self) -> bool:
        return not self.prompt and not self.suffix

    def prepare(self, llm: OllamaModel) -> tuple[Any, Request]:
        """As `Chat.prepare`."""
        if not self.template:
            return self._prepared(llm)
        try:
            return self._prepared(llm.with_edition(replace(llm.edition or Edition(""), template=self.template)))
        except DamagedModel as error:  # of the body, and not of the model
            raise BadField("template", error.message, "send another template") from error

    def _prepared(self, llm: OllamaModel) -> tuple[Any, Request]:
        params = self.sampling_params(llm)
        if self.suffix:
            if find_infill_tokens(llm.tokenizer) is None:
                raise UsageError(f'"{self.model}" does not support insert', "leave the suffix out")
            ids = encode_infill(llm.tokenizer, self.prompt, self.suffix)
            params = replace(params, stop_ids=(*params.stop_ids, *infill_end_ids(llm.tokenizer)))
            return llm, self._prepare_prompt(llm, ids, params, {})
        if self.raw or not llm.has_chat_template:
            if self.system:
                raise UsageError(
                    f'"{self.model}" has no template that could say the system prompt', "leave it out"
                )
            if isinstance(self.think, str) or self.think:
                raise UsageError(f'"{self.model}" does not support thinking', "leave think out")
            return llm, self._prepare_prompt(llm, self.prompt, params, {})
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        arguments = thinking_arguments(llm, self, with_tools=False)
        return llm, self._prepare_prompt(llm, messages, params, arguments)

    def _prepare_prompt(
        self, llm: OllamaModel, prompt: Prompt, params: SamplingParams, arguments: Mapping[str, Any]
    ) -> Request:
        return llm.prepare(
            ChatRequest(
                prompt,
                params,
                template_arguments=arguments,
                before=self.context_ids,
                context=self.num_ctx,
            )
        )


def parse_chat_request(body: Mapping[str, Any]) -> OllamaChat:
    """A body of `/api/chat`. Raises UsageError."""
    asked = parse_body(ChatBody, gather_options(body))
    tools, tool_use = parse_tool_use(parse_tools(asked.tools), asked.tool_choice, parallel=None)
    messages = parse_messages(asked.messages or [])
    return OllamaChat(**_common(asked), messages=messages, tools=tools, tool_use=tool_use)


def parse_generate_request(body: Mapping[str, Any]) -> OllamaGenerate:
    """A body of `/api/generate`. Raises UsageError."""
    asked = parse_body(GenerateBody, gather_options(body))
    if asked.images:
        raise BadField("images", "images are not supported", TEXT_ONLY_REMEDY)
    if asked.raw and (asked.template or asked.system or asked.context):
        raise BadField("raw", "raw mode does not support template, system, or context")
    if asked.suffix and (asked.template or asked.system):
        raise BadField("suffix", "a suffix leaves no room for template and system", "leave them out")
    return OllamaGenerate(
        **_common(asked),
        prompt=asked.prompt or "",
        suffix=asked.suffix or "",
        system=asked.system or "",
        template=asked.template or "",
        context_ids=tuple(asked.context or ()),
        raw=bool(asked.raw),
    )


def _common(asked: CommonBody) -> dict[str, Any]:
    most = asked.top_logprobs or 0
    if not 0 <= most <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}")
    if most and not asked.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs", "send logprobs true, too")
    options = check_options(_known_options(asked.options or {}))
    check_stop_strings("options.stop", options.get("stop", []))
    return {
        "model": asked.model,
        "stream": asked.stream is not False,
        "keep_alive": parse_keep_alive(asked.keep_alive),
        "options": options,
        "grammar": parse_format(asked.format),
        "think": _think(asked.think),
        "logprobs": most if asked.logprobs else None,
    }


def _known_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without those that nobody knows, as Ollama has it, and those that it no longer has. `check_options` refuses
    them."""
    if IGNORED_FIELDS.get() is None:
        return options
    known = dict(options)
    for name, value in options.items():
        if name not in OPTION_TYPES or (name in NEUTRAL and value not in (None, NEUTRAL[name])):
            ignore_field(f"options.{name}", f'there is no option "{name[:80]}"')
            del known[name]
    return known


def _think(think: bool | str | None) -> bool | str | None:
    if isinstance(think, str) and think not in ("high", "medium", "low", "max"):
        raise BadField(
            "think",
            f'invalid think value: "{think[:40]}" (must be "high", "medium", "low", "max", true, or false)',
        )
    return think


def parse_format(value: Any) -> Grammar | None:
    """What the content of an answer must be. Raises UsageError."""
    if value in (None, ""):
        return None
    if value == "json":
        return Grammar(GrammarKind.JSON)
    if not isinstance(value, dict):
        told = json.dumps(value, ensure_ascii=False)[:80]
        raise BadField("format", f'invalid format: {told}; expected "json" or a valid JSON Schema object')
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def with_ollama_defaults(recommended: SamplingParams) -> SamplingParams:
    neutral = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    if any(getattr(recommended, name) != getattr(neutral, name) for name in names):
        return recommended
    return replace(recommended, **OLLAMA_DEFAULTS)


def thinking_arguments(llm: OllamaModel, parsed: OllamaRequest, *, with_tools: bool) -> dict[str, Any]:
    """Arguments for the chat template. A level is said to templates that know levels; to others it is a yes.

    Raises UsageError where the model does not think and is to, or cannot but think; and where it knows no tools.
    """
    if with_tools:
        try:
            llm.template_arguments({}, with_tools=True)
        except UsageError as error:
            raise UsageError(f'"{parsed.model}" does not support tools', error.remedy) from error
    if parsed.think is None or (parsed.think is False and not llm.thinks):
        return {}
    if isinstance(parsed.think, str):
        try:
            return llm.template_arguments({"reasoning_effort": parsed.think}, with_tools=with_tools)
        except UsageError:
            pass
    try:
        return llm.template_arguments({}, think=bool(parsed.think), with_tools=with_tools)
    except UsageError as error:
        if parsed.think and llm.thinks:  # it thinks whether or not it is asked to
            return {}
        told = "thinking" if parsed.think else "to be asked not to think"
        raise UsageError(f'"{parsed.model}" does not support {told}', error.remedy) from error

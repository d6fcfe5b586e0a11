"""Translates bodies of `/api/generate` and `/api/chat` into requests.

Missing options default to the edition's parameters, then to the model's recommendation, then to Ollama's
documented defaults. A prompt that is too long is refused, never truncated: `truncate` and `shift` have no effect.
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
    parse_keep_alive,
)
from localllm.api.openai.bodies import FunctionDefinition, ignore_tool
from localllm.api.openai.requests import parse_tool_use
from localllm.errors import BadField, DamagedModel, UsageError
from localllm.modelfile.edition import Edition
from localllm.modelfile.options import NEUTRAL, OPTION_TYPES, check_options, to_sampling_params
from localllm.request import ChatRequest, Grammar, GrammarKind, Prompt, Request, SamplingParams, ToolUse
from localllm.text.infill import encode_infill, find_infill_tokens, infill_end_ids

OLLAMA_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
ROLES = ("system", "user", "assistant", "tool")
TEXT_ONLY_REMEDY = "send text only"


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
    name: str | None = None  # former name of tool_name
    id: str | None = None  # sent by some clients


class Tool(StrictModel):
    type: str | None = None
    function: FunctionDefinition
    items: Any = None


def parse_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates expect. Raises BadField for unknown fields and roles, wrong types,
    and images."""
    check_count(MAX_MESSAGES, "messages", messages)
    parsed: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # name and id of calls without a result
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not isinstance(message, Mapping):
            raise BadField(path, f"{path} is not an object", "send role and content")
        body = validate(ChatMessage, message, path)
        role = body.role.lower()
        if role not in ROLES:
            raise BadField(f"{path}.role", f"invalid role: {body.role[:40]}, must be one of [{' '.join(ROLES)}]")
        if body.images:
            raise BadField(f"{path}.images", f"{path} has images", TEXT_ONLY_REMEDY)
        if role == "tool" and body.tool_name is None and body.name:
            body = body.model_copy(update={"tool_name": body.name})
        fields: dict[str, Any] = {"role": role, "content": body.content or ""}
        if role == "assistant" and body.thinking:
            fields["reasoning_content"] = body.thinking
        if role == "assistant" and body.tool_calls:
            first = len(open_calls)
            fields["tool_calls"] = [_tool_call(call, number) for number, call in enumerate(body.tool_calls, first)]
            open_calls += [(call["function"]["name"], call["id"]) for call in fields["tool_calls"]]
        if role == "tool":
            fields |= _answered_call(body, open_calls)
        parsed.append(fields)
    return parsed


def _tool_call(call: ToolCallPart, number: int) -> dict[str, Any]:
    """A call with an id: Ollama's clients send none, and some templates expect one of nine letters."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or f"call{number:05}", "type": "function", "function": function}


def _answered_call(body: ChatMessage, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Name and id of the call that a tool message answers: the first open one that matches, which is closed."""
    name, call_id = body.tool_name, body.tool_call_id
    if match := next((c for c in open_calls if name in (None, c[0]) and call_id in (None, c[1])), None):
        open_calls.remove(match)
        name, call_id = name or match[0], call_id or match[1]
    return {key: value for key, value in {"name": name, "tool_call_id": call_id}.items() if value}


def parse_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Functions in the form that chat templates expect; None if there are none. Raises BadField."""
    check_count(MAX_TOOLS, "tools", tools or ())
    parsed: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}"
        if not isinstance(tool, Mapping):
            raise BadField(path, f"{path} is not an object", "send type and function")
        tool_type = tool.get("type")
        if isinstance(tool_type, str) and tool_type not in ("", "function"):
            ignore_tool(tool_type, index)
            continue
        validate(Tool, tool, path)
        known = FunctionDefinition.model_fields
        function = {key: value for key, value in tool["function"].items() if value is not None and key in known}
        parsed.append({"type": "function", "function": function})
    return parsed or None


class OllamaModel(Protocol):
    """The part of an LLM that these requests need."""

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
    """Fields of both requests."""

    model: str
    stream: bool
    keep_alive: float | None  # seconds; None for the default
    options: Mapping[str, Any]
    grammar: Grammar | None
    think: bool | str | None
    logprobs: int | None

    @property
    def num_ctx(self) -> int | None:
        """Requested context in tokens."""
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
        """The LLM to run, which may be an edition, and the request. Raises ContextOverflow and UsageError as
        `LLM.prepare`."""
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
        """See `OllamaChat.prepare`."""
        if not self.template:
            return self._prepared(llm)
        try:
            return self._prepared(llm.with_edition(replace(llm.edition or Edition(""), template=self.template)))
        except DamagedModel as error:  # the fault is in the body's template
            raise BadField("template", error.message, "send another template") from error

    def _prepared(self, llm: OllamaModel) -> tuple[Any, Request]:
        params = self.sampling_params(llm)
        if self.suffix:
            if find_infill_tokens(llm.tokenizer) is None:
                raise UsageError(f'"{self.model}" does not support insert', "leave out suffix")
            ids = encode_infill(llm.tokenizer, self.prompt, self.suffix)
            params = replace(params, stop_ids=(*params.stop_ids, *infill_end_ids(llm.tokenizer)))
            return llm, self._prepare_prompt(llm, ids, params, {})
        if self.raw or not llm.has_chat_template:
            if self.system:
                raise UsageError(f'"{self.model}" has no template for a system prompt', "leave out system")
            if isinstance(self.think, str) or self.think:
                raise UsageError(f'"{self.model}" does not support thinking', "leave out think")
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
    request = validate(ChatBody, gather_options(body))
    tools, tool_use = parse_tool_use(parse_tools(request.tools), request.tool_choice, parallel=None)
    messages = parse_messages(request.messages or [])
    return OllamaChat(**_common(request), messages=messages, tools=tools, tool_use=tool_use)


def parse_generate_request(body: Mapping[str, Any]) -> OllamaGenerate:
    """A body of `/api/generate`. Raises UsageError."""
    request = validate(GenerateBody, gather_options(body))
    if request.images:
        raise BadField("images", "images are not supported", TEXT_ONLY_REMEDY)
    if request.raw and (request.template or request.system or request.context):
        raise BadField("raw", "raw mode does not support template, system, or context")
    if request.suffix and (request.template or request.system):
        raise BadField("suffix", "suffix cannot be combined with template or system", "leave them out")
    return OllamaGenerate(
        **_common(request),
        prompt=request.prompt or "",
        suffix=request.suffix or "",
        system=request.system or "",
        template=request.template or "",
        context_ids=tuple(request.context or ()),
        raw=bool(request.raw),
    )


def _common(request: CommonBody) -> dict[str, Any]:
    top_logprobs = request.top_logprobs or 0
    if not 0 <= top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}")
    if top_logprobs and not request.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs", "send logprobs true as well")
    options = check_options(_known_options(request.options or {}))
    check_stop_strings("options.stop", options.get("stop", []))
    return {
        "model": request.model,
        "stream": request.stream is not False,
        "keep_alive": parse_keep_alive(request.keep_alive),
        "options": options,
        "grammar": parse_format(request.format),
        "think": _think(request.think),
        "logprobs": top_logprobs if request.logprobs else None,
    }


def _known_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options without unknown and obsolete ones, which are recorded as ignored, as in Ollama; or all of them
    if ignored fields are refused, as `check_options` does."""
    if IGNORED_FIELDS.get() is None:
        return options
    known = dict(options)
    for name, value in options.items():
        if name not in OPTION_TYPES or (name in NEUTRAL and value not in (None, NEUTRAL[name])):
            ignore_field(f"options.{name}", f'unknown option "{name[:80]}"')
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
    """Grammar of the answer. Raises BadField."""
    if value in (None, ""):
        return None
    if value == "json":
        return Grammar(GrammarKind.JSON)
    if not isinstance(value, dict):
        shown = json.dumps(value, ensure_ascii=False)[:80]
        raise BadField("format", f'invalid format: {shown}; expected "json" or a valid JSON Schema object')
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def with_ollama_defaults(recommended: SamplingParams) -> SamplingParams:
    """The model's recommendation, or Ollama's defaults if it recommends nothing."""
    neutral = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    if any(getattr(recommended, name) != getattr(neutral, name) for name in names):
        return recommended
    return replace(recommended, **OLLAMA_DEFAULTS)


def thinking_arguments(llm: OllamaModel, parsed: OllamaRequest, *, with_tools: bool) -> dict[str, Any]:
    """Chat template arguments for `think`. A level means "on" for templates without levels.

    Raises UsageError if thinking cannot be turned on or off as requested, or the template does not support tools.
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
        if parsed.think and llm.thinks:  # it always thinks
            return {}
        feature = "thinking" if parsed.think else "turning thinking off"
        raise UsageError(f'"{parsed.model}" does not support {feature}', error.remedy) from error

"""Translates bodies of OpenAI's `/v1/chat/completions` and `/v1/completions` into a `ParsedRequest`.

No field is ignored silently: those without effect are recorded in `body.IGNORED_FIELDS`, or refused. Null means
missing. Defaults are the model's recommended sampling parameters.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from localllm.api.body import (
    MAX_ANSWERS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PROMPTS,
    MAX_STOP_IDS,
    MAX_TEMPLATE_ARGUMENTS,
    StrictModel,
    check_count,
    check_stop_strings,
    ignore_field,
    validate,
)
from localllm.api.openai.bodies import (
    ChatBody,
    CompletionBody,
    ResponseFormat,
    SamplingBody,
    StructuredOutputs,
    drop_ignored_fields,
    parse_tools,
)
from localllm.api.openai.messages import parse_messages
from localllm.api.parsed_request import ParsedRequest, PromptBody
from localllm.errors import BadField, ParameterOutOfRange
from localllm.request import Grammar, GrammarKind, SamplingParams, ToolUse

DEFAULT_COMPLETION_TOKENS = 16  # default of max_tokens for text completions, as in OpenAI's API
MAX_TOKEN_ID_DIGITS = 10


class FunctionName(StrictModel):
    name: str


class FunctionChoice(StrictModel):
    """A function that must be called, or may be."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def parse_tool_use(tools: Any, choice: Any, parallel: bool | None) -> tuple[list[dict[str, Any]] | None, ToolUse]:
    """The functions to declare to the model, and how it may use them, from `tools`, `tool_choice` and
    `parallel_tool_calls`. With the choice `none` no function is declared. Raises BadField."""
    tools = None if tools is None else parse_tools(tools)
    if choice == "none":
        return None, ToolUse()
    use = _use(choice, parallel=parallel is not False)
    if use.must_call and tools is None:
        raise BadField("tool_choice", "tool_choice needs tools", "send tools as well")
    names = {tool["function"]["name"] for tool in tools or ()}
    if missing := next(
        (name for name in (use.name, *use.allowed) if name is not None and name not in names), None
    ):
        raise BadField("tool_choice", f"tool_choice names {missing!r}, which is not in tools", "add it to tools")
    return tools, use if tools else ToolUse()


def _use(choice: Any, *, parallel: bool) -> ToolUse:
    choice_type = choice.get("type") if isinstance(choice, Mapping) else None
    if choice in (None, "auto", "required"):
        return ToolUse(required=choice == "required", parallel=parallel)
    if choice_type == "function":
        return ToolUse(name=validate(FunctionChoice, choice, "tool_choice").function.name, parallel=parallel)
    if choice_type != "allowed_tools":
        remedy = "send none, auto, required, or a function"
        raise BadField("tool_choice", f"tool_choice {choice!r} is not supported", remedy)
    allowed = validate(AllowedToolsChoice, choice, "tool_choice").allowed_tools
    if not allowed.tools:
        raise BadField(
            "tool_choice.allowed_tools.tools", "allowed_tools.tools is empty", 'send "none" as tool_choice'
        )
    names = tuple(tool.function.name for tool in allowed.tools)
    return ToolUse(required=allowed.mode == "required", parallel=parallel, allowed=names)


def parse_chat_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/chat/completions`; defaults: the model's own. Raises UsageError."""
    request = validate(ChatBody, drop_ignored_fields(body))
    n = _count("n", request.n)
    effort, think = _reasoning(request)
    tools, use = parse_tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    arguments = dict(request.chat_template_kwargs or {})
    check_count(MAX_TEMPLATE_ARGUMENTS, "chat_template_kwargs", arguments)
    if effort is not None and effort != "none":
        arguments["reasoning_effort"] = effort
    return ParsedRequest(
        request.model,
        (_messages(request),),
        _params(request, defaults, _max_tokens(request, defaults.max_tokens), _chat_logprobs(request)),
        is_chat=True,
        tools=tools,
        tool_use=use,
        template_arguments=arguments,
        think=think,
        n=n,
        priority=request.priority or 0,
        slot=_slot(request),
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        timings_per_token=bool(request.timings_per_token and request.stream),
    )


def parse_completion_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/completions`; defaults: the model's own. Raises UsageError."""
    request = validate(CompletionBody, drop_ignored_fields(body))
    max_tokens = _max_tokens(request, None)
    if max_tokens is None and -1 not in (request.max_tokens, request.n_predict):
        max_tokens = DEFAULT_COMPLETION_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    params = _params(request, defaults, max_tokens, request.logprobs)
    if request.echo and request.logprobs is not None:
        params = replace(params, prompt_logprobs=request.logprobs)
    prompts = _prompts(request.prompt)
    n, best_of = _answer_counts(request, len(prompts))
    return ParsedRequest(
        request.model,
        prompts,
        params,
        is_chat=False,
        echo=bool(request.echo),
        suffix=_suffix(request, prompts),
        n=n,
        best_of=best_of,
        priority=request.priority or 0,
        slot=_slot(request),
        stream=bool(request.stream),
        include_usage=_include_usage(request),
    )


def _slot(request: SamplingBody) -> int | None:
    return None if request.id_slot == -1 else request.id_slot


def _params(
    request: SamplingBody, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
    names += ("frequency_penalty", "seed", "ignore_eos", "min_tokens")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.repeat_penalty is not None:
        given.setdefault("repetition_penalty", request.repeat_penalty)
    if request.top_k == -1:  # off, as in vLLM
        given["top_k"] = 0
    if request.seed == -1:  # random, as in llama.cpp
        del given["seed"]
    check_count(MAX_STOP_IDS, "stop_token_ids", request.stop_token_ids or ())
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": _biases(request.logit_bias or {})}
    given |= {"grammar": _grammar(request), "stop_ids": tuple(request.stop_token_ids or ())}
    if request.stop is not None:
        given["stop"] = _stop_strings(request.stop)
    try:
        return replace(defaults, **given)
    except ParameterOutOfRange as error:
        is_new_name = error.name == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None
        param = "max_completion_tokens" if is_new_name else error.name
        raise BadField(param, error.message, error.remedy) from None


def _answer_counts(request: CompletionBody, prompts: int) -> tuple[int, int | None]:
    """Answers per prompt: returned and generated, the latter None if they are the same."""
    n = _count("n", request.n, prompts)
    best_of = None if request.best_of is None else _count("best_of", request.best_of, prompts)
    if best_of is not None and best_of < n:
        raise BadField("best_of", f"best_of is {best_of} and n is {n}", "send a best_of of at least n")
    if best_of is not None and best_of > n and request.stream:
        raise BadField("best_of", "best_of cannot be streamed", "leave out best_of or stream")
    return n, best_of if best_of != n else None


def _count(name: str, count: int | None, prompts: int = 1) -> int:
    limit = MAX_ANSWERS // prompts
    if count is not None and not 1 <= count <= limit:
        raise BadField(name, f"{name} is {str(count)[:40]}", f"send 1 to {limit}")
    return count or 1


def _logprobs(name: str, count: int | None) -> int | None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise BadField(name, f"{name} is {str(count)[:40]}", f"send 0 to {MAX_LOGPROBS}")
    return count


def _suffix(request: CompletionBody, prompts: Sequence[PromptBody]) -> str | None:
    """The suffix; None if empty, as clients send an empty one to models without infill."""
    if not request.suffix:
        return None
    if request.echo:
        raise BadField("echo", "echo cannot be combined with suffix", "leave out echo or suffix")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise BadField("suffix", "suffix needs prompts that are strings", "send strings, not token ids")
    return request.suffix


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    check_count(MAX_LOGIT_BIASES, "logit_bias", biases)
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_ID_DIGITS):
            raise BadField("logit_bias", f"logit_bias has the key {token[:40]!r}", "send token ids as keys")
    return {int(token): bias for token, bias in biases.items()}


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise BadField("stop", "stop is neither a string nor a list of strings", "send one of them")
    check_stop_strings("stop", strings)
    return tuple(strings)


def _max_tokens(request: SamplingBody, default: int | None) -> int | None:
    """Token limit from `max_tokens`, its newer name `max_completion_tokens`, or llama.cpp's `n_predict`; -1 means
    no limit."""
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    limits_by_name = {name: limit for name in names if (limit := getattr(request, name, None)) is not None}
    if len(set(limits_by_name.values())) > 1:
        (name, limit), (other, other_limit) = list(limits_by_name.items())[:2]
        raise BadField(name, f"{name} is {limit} and {other} is {other_limit}", "send one of them")
    limit = next(iter(limits_by_name.values()), default)
    return None if limit == -1 else limit


def _messages(request: ChatBody) -> list[dict[str, Any]]:
    """The messages; the last has `prefix` if the answer continues it."""
    messages = parse_messages(request.messages)
    if request.continue_final_message and messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True
    elif request.continue_final_message or request.add_generation_prompt is False:
        name = "continue_final_message" if request.continue_final_message else "add_generation_prompt"
        ignore_field(name, f"{name} needs an assistant message at the end")
    return messages


def _reasoning(request: ChatBody) -> tuple[str | None, bool | None]:
    """Reasoning effort and on/off switch; None for the model's default."""
    options = request.reasoning
    effort = request.reasoning_effort or (options and options.effort)
    think = request.enable_thinking
    if options and options.enabled is not None and think is None:
        think = options.enabled
    if options and options.max_tokens is not None:
        ignore_field("reasoning.max_tokens", "a token budget for reasoning is not supported")
    if options and options.exclude:
        ignore_field("reasoning.exclude", "reasoning is always returned")
    return effort, False if effort == "none" else think


def _grammar(request: SamplingBody) -> Grammar | None:
    """The grammar of the answer, from the fields of OpenAI, llama.cpp or vLLM. Schemas are enforced even if they
    are not `strict`."""
    guided = request.structured_outputs or StructuredOutputs(json=None)
    grammars = {
        "response_format": request.response_format and _response_grammar(request.response_format),
        "json_schema": request.json_schema and _schema_grammar(request.json_schema),
        "grammar": request.grammar and Grammar(GrammarKind.GBNF, request.grammar),
        "guided_json": request.guided_json and _schema_grammar(request.guided_json),
        "guided_regex": request.guided_regex and Grammar(GrammarKind.REGEX, request.guided_regex),
        "guided_choice": request.guided_choice and _choice_grammar(request.guided_choice),
        "guided_grammar": request.guided_grammar and _any_grammar(request.guided_grammar),
        "structured_outputs.json": guided.json_ and _schema_grammar(guided.json_),
        "structured_outputs.regex": guided.regex and Grammar(GrammarKind.REGEX, guided.regex),
        "structured_outputs.choice": guided.choice and _choice_grammar(guided.choice),
        "structured_outputs.grammar": guided.grammar and _any_grammar(guided.grammar),
        "structured_outputs.json_object": Grammar(GrammarKind.JSON) if guided.json_object else None,
    }
    sent = {name: grammar for name, grammar in grammars.items() if isinstance(grammar, Grammar)}
    if len(sent) > 1:
        first, second = list(sent)[:2]
        raise BadField(second, f"{first} and {second} are both grammars", "send one of them")
    return next(iter(sent.values()), None)


def _response_grammar(request: ResponseFormat) -> Grammar | None:
    if request.type == "text":
        return None
    if request.type == "json_object":
        return _schema_grammar(request.schema_) if request.schema_ else Grammar(GrammarKind.JSON)
    if request.json_schema is None:
        raise BadField("response_format.json_schema", "response_format.json_schema is missing", "send it")
    return _schema_grammar(request.json_schema.schema_)


def _schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def _choice_grammar(choices: Sequence[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(list(choices)))


def _any_grammar(text: str) -> Grammar:
    """A GBNF grammar if it has `::=`, otherwise a Lark grammar, whose rules have a colon."""
    return Grammar(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text)


def _chat_logprobs(request: ChatBody) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs", "send logprobs true as well")
    count = _logprobs("top_logprobs", request.top_logprobs) or 0
    return count if request.logprobs else None


def _include_usage(request: SamplingBody) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _prompts(prompt: Any) -> tuple[PromptBody, ...]:
    """One or more prompts, each a string or token ids."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return (prompt,)
    is_list = isinstance(prompt, list) and bool(prompt)
    if is_list and (all(isinstance(item, str) for item in prompt) or all(map(_are_ids, prompt))):
        check_count(MAX_PROMPTS, "prompt", prompt)
        return tuple(prompt)
    raise BadField("prompt", "prompt has the wrong type", "send a string, token ids, or a list of either")


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)

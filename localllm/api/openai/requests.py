"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions` to what an LLM is asked.

Nothing is ignored in silence: what has no effect is noted in `body.IGNORED_FIELDS`, or refused. A field that is
null counts as left out. Beside OpenAI's fields there are those that llama.cpp, vLLM and OpenRouter have made
usual. What a body leaves out is as the model recommends. Knows nothing of HTTP.
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


# What a chat body asks of the use of its functions.
class FunctionName(StrictModel):
    name: str


class FunctionChoice(StrictModel):
    """One function that is to be called, or is allowed."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunctions(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class AllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def parse_tool_use(tools: Any, choice: Any, parallel: bool | None) -> tuple[list[dict[str, Any]] | None, ToolUse]:
    """The functions that the model is told of, and what it has to do with them: of a body's `tools`, `tool_choice`
    and `parallel_tool_calls`. `none` calls no function because the model is told of none. Raises BadField."""
    tools = None if tools is None else parse_tools(tools)
    if choice == "none":
        return None, ToolUse()
    use = _use(choice, parallel=parallel is not False)
    if use.must_call and tools is None:
        raise BadField("tool_choice", "there is a tool_choice and there are no tools", "send tools, too")
    names = {tool["function"]["name"] for tool in tools or ()}
    if missing := next(
        (name for name in (use.name, *use.allowed) if name is not None and name not in names), None
    ):
        raise BadField(
            "tool_choice", f"tool_choice names {missing!r}, which is not among the tools", "send it, too"
        )
    return tools, use if tools else ToolUse()


def _use(choice: Any, *, parallel: bool) -> ToolUse:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if choice in (None, "auto", "required"):
        return ToolUse(required=choice == "required", parallel=parallel)
    if kind == "function":
        return ToolUse(name=validate(FunctionChoice, choice, "tool_choice").function.name, parallel=parallel)
    if kind != "allowed_tools":
        remedy = "send none, auto, required, or a function"
        raise BadField("tool_choice", f"tool_choice {choice!r} is not supported", remedy)
    allowed = validate(AllowedToolsChoice, choice, "tool_choice").allowed_tools
    if not allowed.tools:
        raise BadField("tool_choice.allowed_tools.tools", "no tools are allowed", "send none as tool_choice")
    names = tuple(tool.function.name for tool in allowed.tools)
    return ToolUse(required=allowed.mode == "required", parallel=parallel, allowed=names)


DEFAULT_COMPLETION_TOKENS = 16  # of a text completion that does not say how many, as OpenAI documents
MAX_TOKEN_ID_DIGITS = 10  # of a token's id


def parse_chat_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/chat/completions`; defaults: the model's own. Raises UsageError."""
    asked = validate(ChatBody, drop_ignored_fields(body))
    n = _count("n", asked.n)
    effort, think = _reasoning(asked)
    tools, use = parse_tool_use(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    arguments = dict(asked.chat_template_kwargs or {})
    check_count(MAX_TEMPLATE_ARGUMENTS, "chat_template_kwargs", arguments)
    if effort is not None and effort != "none":
        arguments["reasoning_effort"] = effort
    return ParsedRequest(
        asked.model,
        (_messages(asked),),
        _params(asked, defaults, _most_tokens(asked, defaults.max_tokens), _chat_logprobs(asked)),
        is_chat=True,
        tools=tools,
        tool_use=use,
        template_arguments=arguments,
        think=think,
        n=n,
        priority=asked.priority or 0,
        stream=bool(asked.stream),
        include_usage=_include_usage(asked),
        timings_per_token=bool(asked.timings_per_token and asked.stream),
    )


def parse_completion_request(body: Mapping[str, Any], defaults: SamplingParams) -> ParsedRequest:
    """A body of `/v1/completions`; defaults: the model's own. Raises UsageError."""
    asked = validate(CompletionBody, drop_ignored_fields(body))
    most = _most_tokens(asked, None)
    if most is None and -1 not in (asked.max_tokens, asked.n_predict):
        most = DEFAULT_COMPLETION_TOKENS if defaults.max_tokens is None else defaults.max_tokens
    params = _params(asked, defaults, most, asked.logprobs)
    if asked.echo and asked.logprobs is not None:
        params = replace(params, prompt_logprobs=asked.logprobs)
    prompts = _prompts(asked.prompt)
    n, best_of = _how_many(asked, len(prompts))
    return ParsedRequest(
        asked.model,
        prompts,
        params,
        is_chat=False,
        echo=bool(asked.echo),
        suffix=_suffix(asked, prompts),
        n=n,
        best_of=best_of,
        priority=asked.priority or 0,
        stream=bool(asked.stream),
        include_usage=_include_usage(asked),
    )


def _params(
    asked: SamplingBody, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
    names += ("frequency_penalty", "seed", "ignore_eos")
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if asked.repeat_penalty is not None:
        given.setdefault("repetition_penalty", asked.repeat_penalty)
    if asked.top_k == -1:  # as vLLM says that all tokens stay
        given["top_k"] = 0
    if asked.seed == -1:  # as llama.cpp says that any will do
        del given["seed"]
    if asked.min_tokens:
        ignore_field("min_tokens", "min_tokens is not supported")
    check_count(MAX_STOP_IDS, "stop_token_ids", asked.stop_token_ids or ())
    given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": _biases(asked.logit_bias or {})}
    given |= {"grammar": _grammar(asked), "stop_ids": tuple(asked.stop_token_ids or ())}
    if asked.stop is not None:
        given["stop"] = _stop_strings(asked.stop)
    try:
        return replace(defaults, **given)
    except ParameterOutOfRange as error:
        newer = error.name == "max_tokens" and getattr(asked, "max_completion_tokens", None) is not None
        param = "max_completion_tokens" if newer else error.name
        raise BadField(param, error.message, error.remedy) from None


def _how_many(asked: CompletionBody, prompts: int) -> tuple[int, int | None]:
    """Answers to each prompt: told, and made."""
    n = _count("n", asked.n, prompts)
    best_of = None if asked.best_of is None else _count("best_of", asked.best_of, prompts)
    if best_of is not None and best_of < n:
        raise BadField("best_of", f"best_of is {best_of} and n {n}", "make as many answers as are to be told")
    if best_of is not None and best_of > n and asked.stream:
        raise BadField("best_of", "which answer is best is known at their end", "leave out best_of or stream")
    return n, best_of if best_of != n else None


def _count(name: str, count: int | None, prompts: int = 1) -> int:
    most = MAX_ANSWERS // prompts
    if count is not None and not 1 <= count <= most:
        raise BadField(name, f"{name} is {str(count)[:40]}", f"send 1 to {most}")
    return count or 1


def _logprobs(name: str, count: int | None) -> int | None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise BadField(name, f"{name} is {str(count)[:40]}", f"send 0 to {MAX_LOGPROBS}")
    return count


def _suffix(asked: CompletionBody, prompts: Sequence[PromptBody]) -> str | None:
    """An empty one is none, as clients send it to models that fill no gaps."""
    if not asked.suffix:
        return None
    if asked.echo:
        raise BadField("echo", "the prompt around a gap is no text before the answer", "leave out echo or suffix")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise BadField("suffix", "a suffix needs prompts that are texts", "send texts, not token ids")
    return asked.suffix


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    check_count(MAX_LOGIT_BIASES, "logit_bias", biases)
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_TOKEN_ID_DIGITS):
            raise BadField("logit_bias", f"logit_bias names the token {token[:40]!r}", "name tokens by their ids")
    return {int(token): bias for token, bias in biases.items()}


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise BadField("stop", "stop is neither a string nor a list of strings", "send one of the two")
    check_stop_strings("stop", strings)
    return tuple(strings)


def _most_tokens(asked: SamplingBody, default: int | None) -> int | None:
    """`max_completion_tokens` is the newer name of `max_tokens`, and `n_predict` llama.cpp's; -1 is no limit."""
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    limits_by_name = {name: most for name in names if (most := getattr(asked, name, None)) is not None}
    if len(set(limits_by_name.values())) > 1:
        (name, most), (other, different) = list(limits_by_name.items())[:2]
        raise BadField(name, f"{name} is {most} and {other} {different}", "send one of the two")
    most = next(iter(limits_by_name.values()), default)
    return None if most == -1 else most


def _messages(asked: ChatBody) -> list[dict[str, Any]]:
    """The last one is marked where the answer is to go on with it."""
    messages = parse_messages(asked.messages)
    if asked.continue_final_message and messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True
    elif asked.continue_final_message or asked.add_generation_prompt is False:
        name = "continue_final_message" if asked.continue_final_message else "add_generation_prompt"
        ignore_field(name, f"{name} needs a last message of the assistant")
    return messages


def _reasoning(asked: ChatBody) -> tuple[str | None, bool | None]:
    """How much the model is to think, in a word and by a switch; both None: as it will."""
    options = asked.reasoning
    effort = asked.reasoning_effort or (options and options.effort)
    think = asked.enable_thinking
    if options and options.enabled is not None and think is None:
        think = options.enabled
    if options and options.max_tokens is not None:
        ignore_field("reasoning.max_tokens", "a budget of reasoning is not supported")
    if options and options.exclude:
        ignore_field("reasoning.exclude", "reasoning is always told")
    return effort, False if effort == "none" else think


def _grammar(asked: SamplingBody) -> Grammar | None:
    """What the answer is held to, in the words of whichever server. A schema is kept to whether or not it is
    `strict`."""
    guided = asked.structured_outputs or StructuredOutputs(json=None)
    grammars = {
        "response_format": asked.response_format and _response_grammar(asked.response_format),
        "json_schema": asked.json_schema and _schema_grammar(asked.json_schema),
        "grammar": asked.grammar and Grammar(GrammarKind.GBNF, asked.grammar),
        "guided_json": asked.guided_json and _schema_grammar(asked.guided_json),
        "guided_regex": asked.guided_regex and Grammar(GrammarKind.REGEX, asked.guided_regex),
        "guided_choice": asked.guided_choice and _choice_grammar(asked.guided_choice),
        "guided_grammar": asked.guided_grammar and _any_grammar(asked.guided_grammar),
        "structured_outputs.json": guided.json_ and _schema_grammar(guided.json_),
        "structured_outputs.regex": guided.regex and Grammar(GrammarKind.REGEX, guided.regex),
        "structured_outputs.choice": guided.choice and _choice_grammar(guided.choice),
        "structured_outputs.grammar": guided.grammar and _any_grammar(guided.grammar),
        "structured_outputs.json_object": Grammar(GrammarKind.JSON) if guided.json_object else None,
    }
    sent = {name: grammar for name, grammar in grammars.items() if isinstance(grammar, Grammar)}
    if len(sent) > 1:
        first, second = list(sent)[:2]
        raise BadField(second, f"{first} and {second} hold the answer to two grammars", "send one of the two")
    return next(iter(sent.values()), None)


def _response_grammar(asked: ResponseFormat) -> Grammar | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return _schema_grammar(asked.schema_) if asked.schema_ else Grammar(GrammarKind.JSON)
    if asked.json_schema is None:
        raise BadField("response_format.json_schema", "response_format has no json_schema", "send it")
    return _schema_grammar(asked.json_schema.schema_)


def _schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def _choice_grammar(choices: Sequence[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(list(choices)))


def _any_grammar(text: str) -> Grammar:
    """GBNF defines its rules by `::=`, and Lark by a colon."""
    return Grammar(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text)


def _chat_logprobs(asked: ChatBody) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadField("top_logprobs", "top_logprobs needs logprobs", "send logprobs true, too")
    count = _logprobs("top_logprobs", asked.top_logprobs) or 0
    return count if asked.logprobs else None


def _include_usage(asked: SamplingBody) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


def _prompts(prompt: Any) -> tuple[PromptBody, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return (prompt,)
    several = isinstance(prompt, list) and bool(prompt)
    if several and (all(isinstance(one, str) for one in prompt) or all(map(_are_ids, prompt))):
        check_count(MAX_PROMPTS, "prompt", prompt)
        return tuple(prompt)
    raise BadField("prompt", "the prompt is neither a text, token ids nor a list of those", "send one of them")


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)

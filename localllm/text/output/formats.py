"""Which markup a model writes: chosen by what its chat template and its tokens contain, never by its name."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from localllm.text.output import calls, spelling
from localllm.text.output.blocks import ToolFormat
from localllm.text.output.channels import ChannelFormat, ChannelRouter
from localllm.text.output.delta import PlainRouter, Router
from localllm.text.output.tagged import Reasoning, TaggedRouter

THINK = ("<think>", "</think>")
JSON = {"read": calls.json_calls, "quote": '"', "first": ("{", "[")}


class Row(NamedTuple):
    """A format, and what the template or the tokens of a model that has it contain, all of it."""

    form: Any
    signs: tuple[str, ...]


HARMONY = ChannelFormat(("<|end|>", "<|return|>", "<|call|>"), calls.arguments_alone, spelling.HARMONY)
GLIMMER = ChannelFormat(("<|eom|>", "<|eot|>"), calls.glimmer, spelling.GLIMMER)
CHANNELS = (
    Row(HARMONY, ("<|channel|>", "<|message|>")),
    Row(GLIMMER, ("<|message|>", "<atem:function_calls>")),
)

MINISTRAL = Reasoning("[THINK]", "[/THINK]", anywhere=True)
GEMMA_THOUGHT = Reasoning("<|channel>thought", "<channel|>", anywhere=True, inside=("<|channel>",))
COHERE = Reasoning(
    "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
APRIEL = Reasoning("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", silent=("[END FINAL RESPONSE]",))
GRANITE = Reasoning(*THINK, silent=("<response>", "</response>"))
REASONING = (
    Row(MINISTRAL, ("[THINK]",)),
    Row(GEMMA_THOUGHT, ("<|channel>",)),
    Row(COHERE, ("<|START_THINKING|>",)),
    Row(APRIEL, ("[BEGIN FINAL RESPONSE]",)),
    Row(GRANITE, ("<think>", "<response>")),
    Row(Reasoning(*THINK), ("<think>",)),
    Row(Reasoning(*THINK), ("</think>",)),
)

DEEPSEEK = ToolFormat(
    calls.deepseek,
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁calls▁end｜>",
    quote='"',
    inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    spelling=spelling.DEEPSEEK,
)
DEEPSEEK_MARKUP = ToolFormat(
    calls.invocations("｜DSML｜"),
    ("<｜DSML｜function_calls>",),
    "</｜DSML｜function_calls>",
    last="</｜DSML｜invoke>",
    inside=("｜DSML｜",),
    spelling=spelling.DEEPSEEK_MARKUP,
)
KIMI = ToolFormat(
    calls.kimi,
    ("<|tool_calls_section_begin|>",),
    "<|tool_calls_section_end|>",
    quote='"',
    inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    spelling=spelling.KIMI,
)
GEMMA = ToolFormat(calls.gemma, ("<|tool_call>",), "<tool_call|>", quote='<|"|>', spelling=spelling.GEMMA)
MISTRAL = ToolFormat(
    calls.mistral, ("[TOOL_CALLS]",), inside=("[CALL_ID]", "[ARGS]"), spelling=spelling.MISTRAL_LIST
)
PYTHONIC = ToolFormat(
    calls.pythonic,
    ("<|tool_call_start|>",),
    "<|tool_call_end|>",
    first=("[",),
    last="]",
    spelling=spelling.PYTHONIC,
)
ACTION = ToolFormat(begin=("<|START_ACTION|>",), end="<|END_ACTION|>", spelling=spelling.ACTION, **JSON)
GLM = ToolFormat(
    calls.glm,
    ("<tool_call>",),
    "</tool_call>",
    inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    spelling=spelling.GLM,
)
QWEN_MARKUP = ToolFormat(
    calls.functions,
    ("<tool_call>",),
    "</tool_call>",
    first=("<function=",),
    last="</function>",
    spelling=spelling.QWEN_MARKUP,
)
HERMES = ToolFormat(begin=("<tool_call>",), end="</tool_call>", spelling=spelling.HERMES, **JSON)
FUNCTIONARY = ToolFormat(
    calls.function_json, ("<function=",), "</function>", quote='"', spelling=spelling.FUNCTIONARY
)
LLAMA = ToolFormat(begin=("<|python_tag|>",), bare="{", spelling=spelling.LLAMA, **JSON)
NEMOTRON = ToolFormat(
    begin=("<TOOLCALL>",), end="</TOOLCALL>", spelling=spelling.listed("<TOOLCALL>", "</TOOLCALL>"), **JSON
)
APRIEL_CALLS = ToolFormat(
    begin=("<tool_calls>",), end="</tool_calls>", spelling=spelling.listed("<tool_calls>", "</tool_calls>"), **JSON
)
GIGACHAT = ToolFormat(begin=("<|function_call|>",), spelling=spelling.alone("<|function_call|>"), **JSON)
GIGACHAT_ROLE = ToolFormat(
    begin=("function call<|role_sep|>",),
    inside=("<|role_sep|>",),
    spelling=spelling.alone("function call<|role_sep|>\n"),
    **JSON,
)
GRANITE_CALLS = ToolFormat(begin=("<|tool_call|>",), spelling=spelling.listed("<|tool_call|>", ""), **JSON)
BARE = ToolFormat(begin=(), bare="{", spelling=spelling.BARE, **JSON)
"""Of a model that has no format of its own, where it is made to call a function."""

TOOLS = (
    Row(replace(DEEPSEEK, spelling=spelling.DEEPSEEK_FENCED), ("<｜tool▁calls▁begin｜>", "```json")),
    Row(DEEPSEEK, ("<｜tool▁calls▁begin｜>",)),
    Row(DEEPSEEK_MARKUP, ("｜DSML｜",)),
    Row(KIMI, ("<|tool_calls_section_begin|>",)),
    Row(GEMMA, ("<tool_call|>",)),
    Row(replace(MISTRAL, spelling=spelling.MISTRAL_IDS), ("[TOOL_CALLS]", "[CALL_ID]")),
    Row(replace(MISTRAL, spelling=spelling.MISTRAL), ("[TOOL_CALLS]", "[ARGS]")),
    Row(MISTRAL, ("[TOOL_CALLS]",)),
    Row(PYTHONIC, ("<|tool_call_start|>",)),
    Row(ACTION, ("<|START_ACTION|>",)),
    Row(NEMOTRON, ("<TOOLCALL>",)),
    Row(APRIEL_CALLS, ("<tool_calls>",)),
    Row(GIGACHAT, ("<|function_call|>",)),
    Row(GIGACHAT_ROLE, ("<|role_sep|>",)),
    Row(GRANITE_CALLS, ("<|tool_call|>",)),
    Row(GLM, ("<tool_call>", "<arg_key>")),
    Row(QWEN_MARKUP, ("<tool_call>", "<function=")),
    Row(HERMES, ("<tool_call>",)),
    Row(FUNCTIONARY, ("<function=",)),
    Row(LLAMA, ('{"name": "', '"parameters": ')),
)


@dataclass(frozen=True)
class OutputFormat:
    """What the answers of a model are made of."""

    channels: ChannelFormat | None = None
    reasoning: Reasoning | None = None
    tools: ToolFormat | None = None

    @classmethod
    def of(cls, templates: Mapping[str, str], tokens: Collection[str]) -> "OutputFormat":
        """By a model's chat templates, and where these do not say, by its added tokens."""
        source, known = "\n".join(templates.values()), frozenset(tokens)
        if channels := _choose(CHANNELS, source):
            return cls(channels=channels)
        return cls(
            reasoning=_choose(REASONING, source) or _choose(REASONING, known),
            tools=_choose(TOOLS, source) or _choose(TOOLS, known),
        )

    @property
    def thinks(self) -> bool:
        """May an answer hold what the model thinks?"""
        return bool(self.channels or self.reasoning)

    def router(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Router:
        """For the answer to a prompt that ends like this. Without tools, nothing is taken for a call of one."""
        schemas = dict(map(_parameters, tools))
        if self.channels:
            return ChannelRouter(self.channels, schemas)
        if not self.reasoning and not (self.tools and tools):
            return PlainRouter()
        thinking = bool(self.reasoning and prompt.rstrip().endswith(self.reasoning.begin))
        return TaggedRouter(self.reasoning, self.tools if tools else None, schemas, thinking=thinking)

    def calling(self) -> "OutputFormat":
        """The same of a model that is made to call a function: one without markup for it writes a JSON object."""
        return self if self.channels or self.tools else replace(self, tools=BARE)

    def markup(self, *, with_tools: bool) -> frozenset[str]:
        """The literals that a router must see, also where the tokenizer calls them special and no text."""
        found: list[str] = list(self.channels.markers) if self.channels else []
        if self.reasoning:
            found += [*self.reasoning.markers, *self.reasoning.inside]
        if self.tools and with_tools:
            found += [*self.tools.begin, self.tools.end, self.tools.quote, *self.tools.inside]
        return frozenset(found)


def _choose(rows: Iterable[Row], text: Collection[str]) -> Any:
    """The first format all of whose signs are in the text, or among the tokens."""
    return next((row.form for row in rows if all(sign in text for sign in row.signs)), None)


def _parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function", tool)
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else ""
    return str(name), properties if isinstance(properties, Mapping) else {}

"""Selects a model's markup by the content of its chat template and its tokens, never by its name."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from localllm.text.output import calls, spelling
from localllm.text.output.blocks import ToolCallFormat
from localllm.text.output.channels import ChannelFormat, ChannelParser
from localllm.text.output.reader import OutputParser, PlainParser
from localllm.text.output.tagged import ReasoningFormat, TaggedParser

THINK = ("<think>", "</think>")
JSON_CALLS = {"read": calls.read_json_calls, "string_quote": '"', "expected_next": ("{", "[")}


Format = TypeVar("Format")


class FormatRule(NamedTuple, Generic[Format]):
    """A format, and the markers that must all be in the template or the added tokens of its models."""

    format: Format
    markers: tuple[str, ...]


HARMONY = ChannelFormat(("<|end|>", "<|return|>", "<|call|>"), calls.read_harmony_arguments, spelling.HARMONY)
GLIMMER = ChannelFormat(("<|eom|>", "<|eot|>"), calls.read_glimmer, spelling.GLIMMER)
CHANNEL_RULES = (
    FormatRule(HARMONY, ("<|channel|>", "<|message|>")),
    FormatRule(GLIMMER, ("<|message|>", "<atem:function_calls>")),
)

MINISTRAL = ReasoningFormat("[THINK]", "[/THINK]", anywhere=True)
GEMMA_THOUGHT = ReasoningFormat("<|channel>thought", "<channel|>", anywhere=True, inner_markup=("<|channel>",))
COHERE = ReasoningFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    anywhere=True,
    content_markup=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
APRIEL = ReasoningFormat(
    "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", content_markup=("[END FINAL RESPONSE]",)
)
GRANITE = ReasoningFormat(*THINK, content_markup=("<response>", "</response>"))
REASONING_RULES = (
    FormatRule(MINISTRAL, ("[THINK]",)),
    FormatRule(GEMMA_THOUGHT, ("<|channel>",)),
    FormatRule(COHERE, ("<|START_THINKING|>",)),
    FormatRule(APRIEL, ("[BEGIN FINAL RESPONSE]",)),
    FormatRule(GRANITE, ("<think>", "<response>")),
    FormatRule(ReasoningFormat(*THINK), ("<think>",)),
    FormatRule(ReasoningFormat(*THINK), ("</think>",)),
)

DEEPSEEK = ToolCallFormat(
    calls.read_deepseek,
    ("<｜tool▁calls▁begin｜>",),
    "<｜tool▁calls▁end｜>",
    string_quote='"',
    inner_markup=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    syntax=spelling.DEEPSEEK,
)
DEEPSEEK_MARKUP = ToolCallFormat(
    calls.invocation_reader("｜DSML｜"),
    ("<｜DSML｜function_calls>",),
    "</｜DSML｜function_calls>",
    expected_before_end="</｜DSML｜invoke>",
    inner_markup=("｜DSML｜",),
    syntax=spelling.DEEPSEEK_MARKUP,
)
KIMI = ToolCallFormat(
    calls.read_kimi,
    ("<|tool_calls_section_begin|>",),
    "<|tool_calls_section_end|>",
    string_quote='"',
    inner_markup=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    syntax=spelling.KIMI,
)
GEMMA = ToolCallFormat(
    calls.read_gemma, ("<|tool_call>",), "<tool_call|>", string_quote='<|"|>', syntax=spelling.GEMMA
)
MISTRAL = ToolCallFormat(
    calls.read_mistral, ("[TOOL_CALLS]",), inner_markup=("[CALL_ID]", "[ARGS]"), syntax=spelling.MISTRAL_LIST
)
PYTHONIC = ToolCallFormat(
    calls.read_pythonic,
    ("<|tool_call_start|>",),
    "<|tool_call_end|>",
    expected_next=("[",),
    expected_before_end="]",
    syntax=spelling.PYTHONIC,
)
ACTION = ToolCallFormat(begin=("<|START_ACTION|>",), end="<|END_ACTION|>", syntax=spelling.ACTION, **JSON_CALLS)
GLM = ToolCallFormat(
    calls.read_glm,
    ("<tool_call>",),
    "</tool_call>",
    inner_markup=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    syntax=spelling.GLM,
)
QWEN_MARKUP = ToolCallFormat(
    calls.read_qwen_functions,
    ("<tool_call>",),
    "</tool_call>",
    expected_next=("<function=",),
    expected_before_end="</function>",
    syntax=spelling.QWEN_MARKUP,
)
HERMES = ToolCallFormat(begin=("<tool_call>",), end="</tool_call>", syntax=spelling.HERMES, **JSON_CALLS)
FUNCTIONARY = ToolCallFormat(
    calls.read_functionary, ("<function=",), "</function>", string_quote='"', syntax=spelling.FUNCTIONARY
)
LLAMA = ToolCallFormat(begin=("<|python_tag|>",), bare_begin="{", syntax=spelling.LLAMA, **JSON_CALLS)
NEMOTRON = ToolCallFormat(
    begin=("<TOOLCALL>",),
    end="</TOOLCALL>",
    syntax=spelling.json_list_syntax("<TOOLCALL>", "</TOOLCALL>"),
    **JSON_CALLS,
)
APRIEL_CALLS = ToolCallFormat(
    begin=("<tool_calls>",),
    end="</tool_calls>",
    syntax=spelling.json_list_syntax("<tool_calls>", "</tool_calls>"),
    **JSON_CALLS,
)
GIGACHAT = ToolCallFormat(
    begin=("<|function_call|>",), syntax=spelling.json_object_syntax("<|function_call|>"), **JSON_CALLS
)
GIGACHAT_ROLE = ToolCallFormat(
    begin=("function call<|role_sep|>",),
    inner_markup=("<|role_sep|>",),
    syntax=spelling.json_object_syntax("function call<|role_sep|>\n"),
    **JSON_CALLS,
)
GRANITE_CALLS = ToolCallFormat(
    begin=("<|tool_call|>",), syntax=spelling.json_list_syntax("<|tool_call|>", ""), **JSON_CALLS
)
BARE_JSON = ToolCallFormat(begin=(), bare_begin="{", syntax=spelling.BARE, **JSON_CALLS)
"""Used if a model without its own format is required to call a function."""

TOOL_RULES = (
    FormatRule(replace(DEEPSEEK, syntax=spelling.DEEPSEEK_FENCED), ("<｜tool▁calls▁begin｜>", "```json")),
    FormatRule(DEEPSEEK, ("<｜tool▁calls▁begin｜>",)),
    FormatRule(DEEPSEEK_MARKUP, ("｜DSML｜",)),
    FormatRule(KIMI, ("<|tool_calls_section_begin|>",)),
    FormatRule(GEMMA, ("<tool_call|>",)),
    FormatRule(replace(MISTRAL, syntax=spelling.MISTRAL_IDS), ("[TOOL_CALLS]", "[CALL_ID]")),
    FormatRule(replace(MISTRAL, syntax=spelling.MISTRAL), ("[TOOL_CALLS]", "[ARGS]")),
    FormatRule(MISTRAL, ("[TOOL_CALLS]",)),
    FormatRule(PYTHONIC, ("<|tool_call_start|>",)),
    FormatRule(ACTION, ("<|START_ACTION|>",)),
    FormatRule(NEMOTRON, ("<TOOLCALL>",)),
    FormatRule(APRIEL_CALLS, ("<tool_calls>",)),
    FormatRule(GIGACHAT, ("<|function_call|>",)),
    FormatRule(GIGACHAT_ROLE, ("<|role_sep|>",)),
    FormatRule(GRANITE_CALLS, ("<|tool_call|>",)),
    FormatRule(GLM, ("<tool_call>", "<arg_key>")),
    FormatRule(QWEN_MARKUP, ("<tool_call>", "<function=")),
    FormatRule(HERMES, ("<tool_call>",)),
    FormatRule(FUNCTIONARY, ("<function=",)),
    FormatRule(LLAMA, ('{"name": "', '"parameters": ')),
)


@dataclass(frozen=True)
class OutputFormat:
    """The components of a model's answers."""

    channels: ChannelFormat | None = None
    reasoning: ReasoningFormat | None = None
    tools: ToolCallFormat | None = None

    @classmethod
    def detect(cls, templates: Mapping[str, str], tokens: Collection[str]) -> "OutputFormat":
        """Detect the format by a model's chat templates, otherwise by its added tokens."""
        source, known = "\n".join(templates.values()), frozenset(tokens)
        if channels := _choose(CHANNEL_RULES, source):
            return cls(channels=channels)
        return cls(
            reasoning=_choose(REASONING_RULES, source) or _choose(REASONING_RULES, known),
            tools=_choose(TOOL_RULES, source) or _choose(TOOL_RULES, known),
        )

    @property
    def can_reason(self) -> bool:
        """Whether an answer may contain reasoning."""
        return bool(self.channels or self.reasoning)

    def make_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> OutputParser:
        """Return the parser for the answer to a prompt that ends like this.

        Without tools, nothing is parsed as a call.
        """
        schemas = dict(map(_parameters, tools))
        if self.channels:
            return ChannelParser(self.channels, schemas)
        if not self.reasoning and not (self.tools and tools):
            return PlainParser()
        thinking = bool(self.reasoning and prompt.rstrip().endswith(self.reasoning.begin))
        return TaggedParser(self.reasoning, self.tools if tools else None, schemas, thinking=thinking)

    def for_required_call(self) -> "OutputFormat":
        """Return the format for a required call: a model without markup for calls writes a JSON object."""
        return self if self.channels or self.tools else replace(self, tools=BARE_JSON)

    def markup(self, *, with_tools: bool) -> frozenset[str]:
        """Return literals that a parser must see, even if the tokenizer hides them as special tokens."""
        markers: list[str] = list(self.channels.markers) if self.channels else []
        if self.reasoning:
            markers += [*self.reasoning.markers, *self.reasoning.inner_markup]
        if self.tools and with_tools:
            markers += [*self.tools.begin, self.tools.end, self.tools.string_quote, *self.tools.inner_markup]
        return frozenset(markers)


def _choose(rules: Iterable[FormatRule[Format]], text: Collection[str]) -> Format | None:
    """Return the first format all of whose markers are in `text`, a template or a set of added tokens."""
    return next((rule.format for rule in rules if all(marker in text for marker in rule.markers)), None)


def _parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function", tool)
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else ""
    return str(name), properties if isinstance(properties, Mapping) else {}

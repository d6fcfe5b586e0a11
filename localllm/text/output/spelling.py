"""Syntax in which models write tool calls, as plain data: the inverse of the functions in `calls.py`.

NAME_SLOT, ID_SLOT and KEY_SLOT stand for the function's name, the call's id and a parameter's name.
"""

from dataclasses import dataclass

NAME_SLOT, ID_SLOT, KEY_SLOT = "@name", "@id", "@key"


@dataclass(frozen=True)
class ParameterSyntax:
    """Arguments that are written one by one instead of as one JSON object."""

    before: str
    """Text before a value written as JSON."""

    after: str
    separator: str = ""
    text_before: str | None = None
    """Text before a string written verbatim; None if strings are also JSON."""

    text_after: str | None = None
    """Text after a verbatim string, if it differs from `after`."""

    marks_text: bool = False
    """Whether markup distinguishes strings; otherwise only the schema does, as in `values.parse_typed`."""

    scalars_only: bool = False
    """Lists and objects use a different notation, which is not supported."""


@dataclass(frozen=True)
class ToolCallSyntax:
    """`calls_begin`, one call or several with a separator, `calls_end`."""

    call_begin: str
    """Text before the arguments of a call, including its name."""

    call_end: str
    calls_begin: str = ""
    calls_end: str = ""
    separator: str | None = None
    """Text between two calls; None if such a model makes only one call per answer."""

    id_pattern: str = ""
    """Regular expression for ID_SLOT."""

    parameters: ParameterSyntax | None = None


def json_list_syntax(begin: str, end: str) -> ToolCallSyntax:
    """All calls in one JSON list."""
    return ToolCallSyntax('{"name": "@name", "arguments": ', "}", f"{begin}[", f"]{end}", separator=", ")


def json_object_syntax(begin: str, key: str = "arguments") -> ToolCallSyntax:
    """A call as a JSON object."""
    return ToolCallSyntax(f'{begin}{{"name": "@name", "{key}": ', "}")


BARE = json_object_syntax("")
LLAMA = json_object_syntax("", "parameters")
HERMES = ToolCallSyntax('<tool_call>\n{"name": "@name", "arguments": ', "}\n</tool_call>", separator="\n")
ACTION = ToolCallSyntax(
    '{"tool_call_id": "@id", "tool_name": "@name", "parameters": ',
    "}",
    "<|START_ACTION|>[\n    ",
    "\n]<|END_ACTION|>",
    separator=",\n    ",
    id_pattern="[0-9]",
)
FUNCTIONARY = ToolCallSyntax("<function=@name>", "</function>", separator="")
MISTRAL_LIST = ToolCallSyntax(
    '{"name": "@name", "arguments": ',
    ', "id": "@id"}',
    "[TOOL_CALLS][",
    "]",
    separator=", ",
    id_pattern="[a-zA-Z0-9]{9}",
)
MISTRAL_IDS = ToolCallSyntax("[TOOL_CALLS]@name[CALL_ID]@id[ARGS]", "", separator="", id_pattern="[a-zA-Z0-9]{9}")
MISTRAL = ToolCallSyntax("[TOOL_CALLS]@name[ARGS]", "", separator="")
KIMI = ToolCallSyntax(
    "<|tool_call_begin|>functions.@name:@id<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    separator="",
    id_pattern="0|[1-9][0-9]?",
)
DEEPSEEK_FENCED = ToolCallSyntax(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>@name\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    separator="\n",
)
DEEPSEEK = ToolCallSyntax(
    "<｜tool▁call▁begin｜>@name<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    separator="",
)
DEEPSEEK_MARKUP = ToolCallSyntax(
    '<｜DSML｜invoke name="@name">\n',
    "</｜DSML｜invoke>\n",
    "<｜DSML｜function_calls>\n",
    "</｜DSML｜function_calls>",
    separator="",
    parameters=ParameterSyntax(
        before='<｜DSML｜parameter name="@key" string="false">',
        text_before='<｜DSML｜parameter name="@key" string="true">',
        after="</｜DSML｜parameter>\n",
        marks_text=True,
    ),
)
QWEN_MARKUP = ToolCallSyntax(
    "<tool_call>\n<function=@name>\n",
    "</function>\n</tool_call>",
    separator="\n",
    parameters=ParameterSyntax(
        before="<parameter=@key>\n", text_before="<parameter=@key>\n", after="\n</parameter>\n"
    ),
)
GLM = ToolCallSyntax(
    "<tool_call>@name",
    "</tool_call>",
    separator="",
    parameters=ParameterSyntax(
        before="<arg_key>@key</arg_key><arg_value>",
        text_before="<arg_key>@key</arg_key><arg_value>",
        after="</arg_value>",
    ),
)
GEMMA = ToolCallSyntax(
    "<|tool_call>call:@name{",
    "}<tool_call|>",
    separator="",
    parameters=ParameterSyntax(
        before="@key:",
        text_before='@key:<|"|>',
        after="",
        text_after='<|"|>',
        separator=",",
        marks_text=True,
        scalars_only=True,
    ),
)
PYTHONIC = ToolCallSyntax(
    "@name(",
    ")",
    "<|tool_call_start|>[",
    "]<|tool_call_end|>",
    separator=", ",
    parameters=ParameterSyntax(before="@key=", after="", separator=", "),
)
HARMONY = ToolCallSyntax("<|channel|>commentary to=functions.@name <|constrain|>json<|message|>", "")
GLIMMER = ToolCallSyntax(
    ' to=@name<|message|><atem:function_calls>\n<atem:invoke name="@name">\n',
    "</atem:invoke>\n</atem:function_calls>",
    parameters=ParameterSyntax(
        before='<atem:parameter name="@key">',
        text_before='<atem:parameter name="@key">',
        after="</atem:parameter>\n",
    ),
)

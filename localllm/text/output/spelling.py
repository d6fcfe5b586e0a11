"""How models write tool calls, as plain data: the inverse of the functions in `calls.py`.

NAME, ID and KEY stand in these texts for the function's name, the call's id and a parameter's name.
"""

from dataclasses import dataclass

NAME, ID, KEY = "@name", "@id", "@key"


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one, in place of one JSON object."""

    before: str
    """What stands before a value that is written as JSON."""

    after: str
    between: str = ""
    text: str | None = None
    """What stands before a text that is written as it is; None: texts are JSON, too."""

    text_after: str | None = None
    """What stands after such a text, if something else than `after` does."""

    told_apart: bool = False
    """By the markup one sees what is a text; else by its schema alone, as `values.typed` does."""

    flat: bool = False
    """Lists and objects are written in a way of their own, which is not known here."""


@dataclass(frozen=True)
class Spelling:
    """`begin`, one call or several with something between them, `end`."""

    open: str
    """Before the arguments of a call, with its name."""

    close: str
    begin: str = ""
    end: str = ""
    between: str | None = None
    """Between two calls; None: such a model makes one call an answer."""

    id: str = ""
    """A regular expression for what stands at ID."""

    parameters: Parameters | None = None


def listed(begin: str, end: str) -> Spelling:
    """All calls in one JSON list."""
    return Spelling('{"name": "@name", "arguments": ', "}", f"{begin}[", f"]{end}", between=", ")


def alone(begin: str, key: str = "arguments") -> Spelling:
    """One JSON object."""
    return Spelling(f'{begin}{{"name": "@name", "{key}": ', "}")


BARE = alone("")
LLAMA = alone("", "parameters")
HERMES = Spelling('<tool_call>\n{"name": "@name", "arguments": ', "}\n</tool_call>", between="\n")
ACTION = Spelling(
    '{"tool_call_id": "@id", "tool_name": "@name", "parameters": ',
    "}",
    "<|START_ACTION|>[\n    ",
    "\n]<|END_ACTION|>",
    between=",\n    ",
    id="[0-9]",
)
FUNCTIONARY = Spelling("<function=@name>", "</function>", between="")
MISTRAL_LIST = Spelling(
    '{"name": "@name", "arguments": ', ', "id": "@id"}', "[TOOL_CALLS][", "]", between=", ", id="[a-zA-Z0-9]{9}"
)
MISTRAL_IDS = Spelling("[TOOL_CALLS]@name[CALL_ID]@id[ARGS]", "", between="", id="[a-zA-Z0-9]{9}")
MISTRAL = Spelling("[TOOL_CALLS]@name[ARGS]", "", between="")
KIMI = Spelling(
    "<|tool_call_begin|>functions.@name:@id<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    between="",
    id="0|[1-9][0-9]?",
)
DEEPSEEK_FENCED = Spelling(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>@name\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    between="\n",
)
DEEPSEEK = Spelling(
    "<｜tool▁call▁begin｜>@name<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    between="",
)
DEEPSEEK_MARKUP = Spelling(
    '<｜DSML｜invoke name="@name">\n',
    "</｜DSML｜invoke>\n",
    "<｜DSML｜function_calls>\n",
    "</｜DSML｜function_calls>",
    between="",
    parameters=Parameters(
        before='<｜DSML｜parameter name="@key" string="false">',
        text='<｜DSML｜parameter name="@key" string="true">',
        after="</｜DSML｜parameter>\n",
        told_apart=True,
    ),
)
QWEN_MARKUP = Spelling(
    "<tool_call>\n<function=@name>\n",
    "</function>\n</tool_call>",
    between="\n",
    parameters=Parameters(before="<parameter=@key>\n", text="<parameter=@key>\n", after="\n</parameter>\n"),
)
GLM = Spelling(
    "<tool_call>@name",
    "</tool_call>",
    between="",
    parameters=Parameters(
        before="<arg_key>@key</arg_key><arg_value>",
        text="<arg_key>@key</arg_key><arg_value>",
        after="</arg_value>",
    ),
)
GEMMA = Spelling(
    "<|tool_call>call:@name{",
    "}<tool_call|>",
    between="",
    parameters=Parameters(
        before="@key:", text='@key:<|"|>', after="", text_after='<|"|>', between=",", told_apart=True, flat=True
    ),
)
PYTHONIC = Spelling(
    "@name(",
    ")",
    "<|tool_call_start|>[",
    "]<|tool_call_end|>",
    between=", ",
    parameters=Parameters(before="@key=", after="", between=", "),
)
HARMONY = Spelling("<|channel|>commentary to=functions.@name <|constrain|>json<|message|>", "")
GLIMMER = Spelling(
    ' to=@name<|message|><atem:function_calls>\n<atem:invoke name="@name">\n',
    "</atem:invoke>\n</atem:function_calls>",
    parameters=Parameters(
        before='<atem:parameter name="@key">', text='<atem:parameter name="@key">', after="</atem:parameter>\n"
    ),
)

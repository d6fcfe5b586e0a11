"""Model output that differs from templates: other spellings, mistakes, truncation, and hostile texts."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.text.output import formats
from localllm.text.output.channels import ChannelParser
from localllm.text.output.formats import OutputFormat
from localllm.text.output.reader import OutputParser
from tests.text.output.turns import TOOLS, cuts, joined, route
from tests.work import growth_of_time, lines_of

THINK = formats.ReasoningFormat("<think>", "</think>")
ROWS = [*formats.TOOL_RULES, *formats.CHANNEL_RULES]
A1 = ("f", {"a": 1})


def tagged(tools: Any, reasoning: Any = THINK, prompt: str = "") -> OutputParser:
    return OutputFormat(reasoning=reasoning, tools=tools).make_parser(prompt, TOOLS)


def harmony() -> OutputParser:
    return OutputFormat(channels=formats.HARMONY).make_parser("<|start|>assistant", TOOLS)


CALLS = [
    (formats.HERMES, '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', [A1]),
    (formats.HERMES, '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>', [A1]),
    (formats.HERMES, '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>',
     [A1, ("g", {})]),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [A1]),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\""}}</tool_call>',
     [("f", {"a": '}</tool_call>"'})]),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{"}}</tool_call>',
     [("f", {"a": "<tool_call>{"})]),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}</tool_call>',
     [("f", {"a": "two\nlines"})]),
    (formats.QWEN_MARKUP, "<tool_call>\n<function=weather>\n</function>\n</tool_call>", [("weather", {})]),
    (formats.QWEN_MARKUP, "<tool_call><function=weather><parameter=days>3</parameter></function></tool_call>",
     [("weather", {"days": 3})]),
    (formats.QWEN_MARKUP,
     "<tool_call>\n<function=weather>\n<parameter=city>\n 3 </tool_call>\n</parameter> 4 \n</parameter>\n"
     "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
     [("weather", {"city": " 3 </tool_call>\n</parameter> 4 ", "exact": True})]),
    (formats.GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
     [("weather", {"city": "3"})]),
    (formats.GLM, "<tool_call>weather</tool_call>", [("weather", {})]),
    (formats.LLAMA, '{"name": "f", "parameters": {"a": 1}}', [A1]),
    (formats.LLAMA, '\n {"type": "function", "name": "f", "parameters": {"a": 1}}', [A1]),
    (formats.LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
     [A1, ("g", {})]),
    (formats.MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', [A1, ("g", {})]),
    (formats.MISTRAL, '[TOOL_CALLS]f{"a": 1}', [A1]),
    (formats.MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [A1]),
    (formats.PYTHONIC, "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", [A1]),
    (formats.PYTHONIC,
     """<|tool_call_start|>[f(a="it's \\"b\\"\\n", c=[1, -2.5e3, None], d={'e': True, "g": ()}), x.y()]<|tool_call_end|>""",  # noqa: E501
     [("f", {"a": 'it\'s "b"\n', "c": [1, -2500.0, None], "d": {"e": True, "g": []}}), ("x.y", {})]),
    (formats.PYTHONIC, r"<|tool_call_start|>[f(a='\d\u00e9\x41')]<|tool_call_end|>", [("f", {"a": r"\déA"})]),
    (formats.GEMMA, '<|tool_call>call:f{a:1}<tool_call|>', [A1]),
    (formats.GEMMA, '<|tool_call>call:f{a:<|"|>C:\\<|"|>}<tool_call|>', [("f", {"a": "C:\\"})]),
    (formats.GEMMA,
     '<|tool_call>call:f{a:<|"|><tool_call|>{,}<|"|>,<|"|>b c<|"|>:[true,{x:null}],d:{}}<tool_call|>',
     [("f", {"a": "<tool_call|>{,}", "b c": [True, {"x": None}], "d": {}})]),
    (formats.DEEPSEEK,
     '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [A1]),
    (formats.KIMI,
     "<|tool_calls_section_begin|><|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|> "
     '{"a": 1} <|tool_call_end|><|tool_calls_section_end|>', [A1]),
    (formats.FUNCTIONARY, '<function=f>{"a": 1}</function><function=g>{}</function>', [A1, ("g", {})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text", "calls"), CALLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_calls_in_every_spelling(form: Any, text: str, calls: list[Any]):
    for pieces in cuts(text):
        assert joined(route(tagged(form), pieces)) == ("", "", calls)


MALFORMED = [
    (formats.HERMES, "<tool_call>"),
    (formats.HERMES, "Write <tool_call> before it. </tool_call> ends it."),
    (formats.HERMES, '<tool_call>{"name": "f", "argum'),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call> so'),
    (formats.HERMES, '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
    (formats.HERMES, '<tool_call>{"name": 3}</tool_call>'),
    (formats.HERMES, '<tool_call>{"name": "f"} and more</tool_call>'),
    (formats.HERMES, "<tool_call>[]</tool_call>"),
    (formats.HERMES, "<tool_call>" + "[" * 100_000),
    (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
    (formats.QWEN_MARKUP, "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    (formats.QWEN_MARKUP, "<tool_call>{}</tool_call>"),
    (formats.GLM, "<tool_call>two words</tool_call>"),
    (formats.GLM, "<tool_call>f<arg_key>a</arg_key></tool_call>"),
    (formats.LLAMA, '{"answer": 42}'),
    (formats.LLAMA, "<|python_tag|>print(1)"),
    (formats.MISTRAL, "[TOOL_CALLS]"),
    (formats.MISTRAL, "[TOOL_CALLS]f[ARGS]{"),
    (formats.PYTHONIC, "<|tool_call_start|>[f(a=b)]<|tool_call_end|>"),
    (formats.PYTHONIC, "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    (formats.PYTHONIC, "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>"),
    (formats.PYTHONIC, "<|tool_call_start|>[f(a=__import__('os'))]<|tool_call_end|>"),
    (formats.PYTHONIC, "<|tool_call_start|>[f(a=" + "[" * 100_000 + "]<|tool_call_end|>"),
    (formats.GEMMA, "<|tool_call>call:f{a}<tool_call|>"),
    (formats.GEMMA, "<|tool_call>call:f[]<tool_call|>"),
    (formats.DEEPSEEK, "<｜tool▁calls▁begin｜>so<｜tool▁calls▁end｜>"),
    (formats.DEEPSEEK_MARKUP, '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜function_calls>'),
    (formats.KIMI, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text"), MALFORMED, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_text_that_is_no_call_is_content(form: Any, text: str):
    for pieces in cuts(text):
        for space in ("", "  \n"):
            assert joined(route(tagged(form), [space, *pieces, space])) == ("", space + text + space, [])


def test_a_block_without_its_end_does_not_swallow_the_next():
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}'
    for text, said, calls in (
        (f"{call}\n{call}</tool_call>", "", [A1, A1]),
        (f'Write <tool_call>{{"name": ... {call}</tool_call>', 'Write <tool_call>{"name": ... ', [A1]),
    ):
        for pieces in cuts(text):
            reasoning, content, found = joined(route(tagged(formats.HERMES), pieces))
            assert (reasoning, content.rstrip(), found) == ("", said.rstrip(), calls)


def test_text_that_is_clearly_no_call_is_not_held_back():
    router = tagged(formats.HERMES)
    said = [delta.text for delta in router.push("Use <tool_call> for that, as")]
    assert "".join(said) == "Use <tool_call> for that, as"


def test_only_what_may_be_markup_or_stand_beside_it_is_held_back():
    router = tagged(formats.HERMES)
    given = [
        [delta.text for delta in router.push(piece)] for piece in ("Once", " upon", " a ", "<to", "y", " <", ">")
    ]
    assert given == [["Once"], [" upon"], [" a"], [], [" <toy"], [], [" <>"]]
    plain = tagged(None)  # once content has begun, nothing can come but content
    given = [[delta.text for delta in plain.push(piece)] for piece in (" ", "a\n", "\n<think", ">")]
    assert given == [[], [" a\n"], ["\n<think"], [">"]]


def test_white_space_without_end_is_not_held_back():
    router = tagged(formats.HERMES)
    said = "".join(delta.text for _ in range(100) for delta in router.push("\n"))
    assert 80 <= len(said) < 100
    said += "".join(delta.text for delta in router.finish())
    assert said == "\n" * 100


def test_half_a_surrogate_pair_stays_an_escape():
    [delta] = route(tagged(formats.HERMES), ['<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}</tool_call>'])
    assert delta.call and delta.call.arguments == '{"a": "\\ud800"}'


def test_ids_of_the_model_are_kept():
    texts = [
        (formats.MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}', "abc"),
        (formats.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}]', "abc"),
        (formats.HERMES, '<tool_call>{"name": "f", "id": 3}</tool_call>', ""),
        (formats.KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
                       "<|tool_call_end|><|tool_calls_section_end|>", "functions.f:0"),
    ]  # fmt: skip
    for form, text, call_id in texts:
        [delta] = route(tagged(form), [text])
        assert delta.call and (delta.call.name, delta.call.id) == ("f", call_id)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>\nhm\n</think>\n\nYes.\n", ("hm", "Yes.\n")),
        ("<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        (" <think>a</think> b", ("a", "b")),
        ("<think>a</think><think>b</think>c", ("ab", "c")),
        ("<think>never ended ", ("never ended ", "")),
        ("Write <think> and </think>.", ("", "Write <think> and </think>.")),
        ("  two  spaces\n\n", ("", "  two  spaces\n\n")),
        (" \n", ("", " \n")),
        ("a < b <th", ("", "a < b <th")),
        ("", ("", "")),
    ],
)
def test_thoughts_come_before_the_answer(text: str, said: tuple[str, str]):
    for pieces in cuts(text):
        assert joined(route(tagged(None), pieces)) == (*said, [])


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "<｜Assistant｜><think>"])
def test_a_prompt_that_ends_amid_thoughts_needs_no_beginning(prompt: str):
    for pieces in cuts("\nhm</think>\n\nYes."):
        assert joined(route(tagged(None, prompt=prompt), pieces)) == ("hm", "Yes.", [])
    assert joined(route(tagged(None, prompt="<think>\n\n</think>\n\n"), ["Yes."])) == ("", "Yes.", [])


def test_markup_around_the_answer_says_nothing():
    granite = OutputFormat.detect({"default": "<think> <response>"}, ())
    text = "<think>a</think><response>b</response>"
    for pieces in cuts(text):
        assert joined(route(granite.make_parser("", ()), pieces)) == ("a", "b", [])
    asked_for = "Here: <response>\n<a/> </response> as XML"
    for pieces in cuts(asked_for):
        assert joined(route(granite.make_parser("", ()), pieces)) == ("", asked_for, [])


CHANNEL_TEXTS = [
    ("<|channel|>final<|message|>Hi<|return|>", ("", "Hi", [])),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi", ("hm", "Hi", [])),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', ("", "I look.", [A1])),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ("", "", [A1])),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{bad", ("", "{bad", [])),
    ("<|channel|>commentary to=functions.f<|message|>{} and more", ("", "{} and more", [])),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b", [])),
    ("Hello without a header", ("", "Hello without a header", [])),
    (" to be or not", ("", " to be or not", [])),
    (" to=nothing", ("", " to=nothing", [])),
    ("<|channel|>anal", ("", "", [])),
    ("<|channel|>" + "x" * 400, ("", "<|channel|>" + "x" * 400, [])),
    ("<|message|>a<|end|>b", ("", "ab", [])),
    ("<|channel|>final<|message|>  a\n", ("", "  a\n", [])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"), CHANNEL_TEXTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_channels(text: str, said: tuple[str, str, list[Any]]):
    for pieces in cuts(text):
        assert joined(route(harmony(), pieces)) == said


def test_without_functions_a_message_to_one_is_content():
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    thought = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    for pieces in cuts(text):
        assert joined(route(OutputFormat(channels=formats.HARMONY).make_parser("", ()), pieces)) == (
            "",
            '{"a": 1}',
            [],
        )
    assert joined(route(OutputFormat(channels=formats.HARMONY).make_parser("", ()), [thought])) == (
        "1 + 1",
        "",
        [],
    )


def test_typed_parameters():
    schema = {
        "s": {"type": "string"},
        "n": {"type": "number"},
        "i": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "enum": {"enum": ["1", "2"]},
        "odd": {"type": 7, "anyOf": 3},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": schema}}}
    given = {
        "s": "3",
        "n": "3",
        "i": "null",
        "any": "[1]",
        "enum": "1",
        "odd": "1.5",
        "free": '{"x": 1}',
        "t": "3 of",
    }
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in given.items())
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    [delta] = route(OutputFormat(tools=formats.QWEN_MARKUP).make_parser("", [tool]), [text])
    assert delta.call and json.loads(delta.call.arguments) == {
        "s": "3", "n": 3, "i": None, "any": [1], "enum": "1", "odd": 1.5, "free": {"x": 1}, "t": "3 of",
    }  # fmt: skip


@pytest.mark.parametrize("tools", [[], [{}], [{"function": None}], [{"function": {"name": "f", "parameters": 3}}]])
def test_tools_of_any_shape_make_a_router(tools: list[Any]):
    assert joined(route(OutputFormat(tools=formats.GLM).make_parser("", tools), ["Hi"])) == ("", "Hi", [])


WORDS = [
    "<",
    "<think>",
    "</think>",
    " ",
    "\n",
    "\n" * 11,
    "a",
    "{",
    "}",
    '"',
    "\\",
    "é",
    "function=f>",
    '{"name": "f"}',
]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.markers[-1])
@settings(max_examples=settings.default.max_examples * 3 // 5, deadline=None)
@given(drawn=st.data())
def test_any_cut_of_any_text_gives_the_same_pieces_joined(row: Any, drawn: st.DataObject):
    markup = (
        row.format.markers
        if row in formats.CHANNEL_RULES
        else (*row.format.begin, row.format.end, *row.format.inner_markup)
    )
    texts = st.lists(st.sampled_from([*WORDS, *filter(None, markup)]), max_size=15).map("".join)
    text = drawn.draw(texts)
    places = sorted(drawn.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    def router() -> OutputParser:
        if row in formats.CHANNEL_RULES:
            return ChannelParser(row.format, {"f": {}})
        return tagged(row.format)

    whole = joined(route(router(), [text]))
    assert joined(route(router(), pieces)) == whole
    assert joined(route(router(), list(text))) == whole


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "<tool_call>", "</tool_call>"]), max_size=20).map("".join))
def test_nothing_is_lost_but_markup_and_the_space_beside_it(text: str):
    deltas = route(tagged(formats.HERMES), list(text))
    rest = text
    for delta in deltas:
        if delta.call is None:
            for character in delta.text:  # what is said comes in order
                assert character in rest
                rest = rest.partition(character)[2]
    reasoning, content, calls = joined(deltas)
    if not calls:
        said = "".join((reasoning + content).split())
        left = "".join(text.split())
        for marker in ("<think>", "</think>"):
            said, left = said.replace(marker, ""), left.replace(marker, "")
        assert said == left


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    ("begin", "repeated", "end"),
    [
        ("", "word ", ""),
        ("", "<" * 5, ""),
        ("", "\n" * 5, ""),
        ("", "<think>", ""),
        ("", "<tool_call>", ""),
        ('<tool_call>{"a": "', "</tool_call>", ""),
        ('<tool_call>{"name": "f", "arguments": {"a": "', 'x\\n\\"', '"}}</tool_call>'),
    ],
)
def test_a_token_costs_as_much_late_as_early(begin: str, repeated: str, end: str):
    def prepare(count: int) -> Callable[[], None]:
        text, router = begin + repeated * count + end, tagged(formats.HERMES)
        pieces = [text[place : place + 4] for place in range(0, len(text), 4)]

        def route() -> None:
            for piece in pieces:
                router.push(piece)
            router.finish()

        return route

    assert growth_of_time(prepare, 1000, 16) < 16**1.5  # 16 measured, and 16² if it were quadratic
    assert lines_of(prepare(1000)) < 1250 * len(repeated) // 5 * 200  # 27 to 70 per token measured

"""Thoughts, calls and content of scripted answers through the whole engine."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import localllm
from localllm import LLM, FinishReason, SamplingParams
from localllm.errors import UsageError
from localllm.request import ChatRequest, EventType
from tests.scripted import CHATML, write_scripted
from tests.shared import shared

QUESTION = [{"role": "user", "content": "Well?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
THINKING = ("<think>", "hm", " so", "</think>", "Yes", ",", " it", " is")
CALLING = (
    "<think>",
    "hm",
    "</think>",
    "I",
    " call",
    "<tool_call>",
    '{"name":',
    '"f","arguments":',
    '{"a": 1}',
    "}",
    "</tool_call>",
)
Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    opened: dict[tuple[Any, ...], LLM] = {}

    def of(script: tuple[str, ...], **options: Any) -> LLM:
        key = (script, *options.items())
        if key not in opened:
            opened[key] = localllm.load(write_scripted(tmp_path_factory.mktemp("model"), script, **options))
        return opened[key]

    yield of
    for llm in opened.values():
        llm.close()


def test_reasoning_is_no_part_of_the_text(load: Load) -> None:
    done = load(THINKING).chat(QUESTION)
    assert (done.reasoning, done.text, done.tool_calls) == ("hm so", "Yes, it is", ())
    assert done.finish_reason == FinishReason.STOP
    assert len(done.token_ids) == done.metrics.output_tokens == 9


def test_raw_text_is_content_with_all_its_markup(load: Load) -> None:
    done = load(THINKING).generate("\n")
    assert (done.reasoning, done.text) == ("", "".join(THINKING))


def test_events_have_a_type_and_each_token_appears_once(load: Load) -> None:
    llm = load(CALLING)
    events = list(llm.stream(QUESTION, SamplingParams(temperature=0, logprobs=0), TOOLS))
    kinds = [event.kind for event in events if event.text or event.tool_call]
    assert list(dict.fromkeys(kinds)) == [EventType.REASONING, EventType.CONTENT, EventType.TOOL_CALL]
    assert [len(event.token_ids) for event in events] == [len(event.logprobs) for event in events]
    assert sum(len(event.token_ids) for event in events) == events[-1].metrics.output_tokens
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert [event.metrics for event in events[:-1]] == [None] * (len(events) - 1)


def test_tool_calls_are_read_where_there_are_tools(load: Load) -> None:
    done = load(CALLING).chat(QUESTION, tools=TOOLS)
    [call] = done.tool_calls
    assert (done.reasoning, done.text) == ("hm", "I call")
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})
    assert len(call.id) == 9 and call.id.isalnum()
    assert load(CALLING).chat(QUESTION, tools=TOOLS).tool_calls[0].id != call.id
    assert load(CALLING).chat(QUESTION).text == "".join(CALLING[3:])


def test_a_call_that_was_cut_is_text(load: Load) -> None:
    done = load(CALLING).chat(QUESTION, SamplingParams(temperature=0, max_tokens=7), TOOLS)
    assert done.tool_calls == ()
    assert done.text == 'I call<tool_call>{"name":'
    assert done.finish_reason == FinishReason.LENGTH


def test_stop_strings_apply_to_content_only(load: Load) -> None:
    done = load(THINKING).chat(QUESTION, SamplingParams(temperature=0, stop=("so", "it")))
    assert (done.reasoning, done.text, done.finish_reason) == ("hm so", "Yes, ", FinishReason.STOP)
    done = load(THINKING).chat(QUESTION, SamplingParams(temperature=0, stop=("m s", "is not")))
    assert (done.reasoning, done.text) == ("hm so", "Yes, it is")


def test_a_prompt_that_begins_the_thoughts(load: Load) -> None:
    template = shared("templates/Qwen3.5-4B.jinja").read_text()
    done = load(("hm", "</think>", "Yes"), template=template).chat(QUESTION)
    assert (done.reasoning, done.text) == ("hm", "Yes")


def test_control_tokens_that_are_markup_reach_the_router_and_others_do_not(load: Load) -> None:
    script = ("<|box|>", "hm ", "<|tool_call_start|>", "[f(a=1)", "<|box_end|>", "]", "<|tool_call_end|>")
    template = CHATML.partition("{#")[0]  # it says nothing of tools: the tokens do
    llm = load(script, special=tuple(piece for piece in script if piece.startswith("<|")), template=template)
    done = llm.chat(QUESTION, tools=TOOLS)
    assert (done.text, [call.arguments for call in done.tool_calls]) == ("hm", ['{"a": 1}'])
    assert llm.chat(QUESTION).text == "hm [f(a=1)]"


def test_an_answer_with_parts_survives_a_round_trip(load: Load) -> None:
    llm = load(CALLING, template=shared("templates/Qwen-Qwen3-0.6B.jinja").read_text())
    done = llm.chat(QUESTION, tools=TOOLS)
    [call] = done.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    turn = {
        "role": "assistant",
        "content": done.text,
        "reasoning_content": done.reasoning,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    messages = [*QUESTION, turn, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    request = llm.prepare(ChatRequest(messages, tools=TOOLS))
    prompt = llm.tokenizer.decode(request.prompt_ids, skip_special=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt


def test_content_that_was_held_for_a_stop_string_comes_before_the_call(load: Load) -> None:
    prompt = {
        "params": SamplingParams(temperature=0, max_tokens=12, stop=("I call<tool", "nothing")),
        "tools": TOOLS,
    }
    kinds = [event.kind for event in load(CALLING).stream(QUESTION, **prompt) if event.text or event.tool_call]
    assert kinds[-1] == EventType.TOOL_CALL
    assert (
        "".join(e.text for e in load(CALLING).stream(QUESTION, **prompt) if e.kind is EventType.CONTENT)
        == "I call"
    )


def test_an_empty_list_of_tools_needs_no_template_support(load: Load) -> None:
    silent = CHATML.replace("{% if tools %}{{ tools[0].function.name }}{% endif %}", "")
    assert load(THINKING, template=silent).chat(QUESTION, tools=[]).text == "Yes, it is"
    with pytest.raises(UsageError, match="does not read tools"):
        load(THINKING, template=silent).chat(QUESTION, tools=TOOLS)


def test_arguments_that_the_template_does_not_read_are_refused(load: Load) -> None:
    with pytest.raises(UsageError, match="does not read enable_thinkin;"):
        load(THINKING).chat(QUESTION, template_arguments={"enable_thinkin": True})


def test_tools_that_are_no_objects_are_refused(load: Load) -> None:
    with pytest.raises(UsageError, match="a tool is not an object"):
        load(THINKING).chat(QUESTION, tools=["f"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="tools and template arguments require a chat"):
        load(THINKING).stream("Well?", tools=TOOLS)


def test_the_end_of_a_turn_is_known_without_generation_config(load: Load) -> None:
    llm = load(THINKING)
    assert llm.tokenizer.encode("<|im_end|>")[0] in llm.eos_ids

"""Requests and answers of Ollama's API for scripted models that think and call functions."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ollama
import pytest

import localllm
from localllm import LLM
from localllm.api.ollama.bodies import parse_keep_alive
from localllm.api.ollama.requests import (
    OLLAMA_DEFAULTS,
    parse_chat_request,
    parse_generate_request,
    parse_messages,
)
from localllm.api.ollama.responses import ChunkWriter, RequestTimes, format_rfc3339, merge_chunks, nanoseconds
from localllm.api.tokens import TokenTexts
from localllm.errors import UsageError
from localllm.modelfile.edition import Edition
from localllm.request import ChatRequest, SamplingParams
from tests.scripted import CHATML, write_scripted
from tests.shared import shared

THINKING = ("<think>", "hm", " so", "</think>", "Yes", ",", " it", " is")
CALLING = ("I", " call", "<tool_call>", '{"name":', '"f","arguments":', '{"a": 1}', "}", "</tool_call>")
SWITCH = CHATML + "{% if enable_thinking is defined and not enable_thinking %}{% endif %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
WELL = [{"role": "user", "content": "Well?"}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localllm.load(write_scripted(tmp_path_factory.mktemp("thinker"), THINKING, template=SWITCH)) as llm:
        yield llm


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localllm.load(write_scripted(tmp_path_factory.mktemp("caller"), CALLING)) as llm:
        yield llm


def chunks(llm: LLM, asked: Any) -> list[dict[str, Any]]:
    model, request = asked.prepare(llm)
    now = time.perf_counter()
    writer = ChunkWriter(asked, request, TokenTexts(llm.tokenizer), RequestTimes(now, now))
    return [chunk for event in model.submit(request) for chunk in writer.chunks_for(event, time.perf_counter())]


def test_thoughts_have_a_field_of_their_own(thinker: LLM) -> None:
    made = chunks(thinker, parse_chat_request({"model": "m", "messages": WELL}))
    first = made[0]["message"]
    assert first == {"role": "assistant", "content": "", "thinking": "hm"}
    read = ollama.ChatResponse(**merge_chunks(made))
    assert (read.message.thinking, read.message.content) == ("hm so", "Yes, it is")
    made = chunks(thinker, parse_generate_request({"model": "m", "prompt": "Well?"}))
    told = ollama.GenerateResponse(**merge_chunks(made))
    assert (told.thinking, told.response) == ("hm so", "Yes, it is")


@pytest.mark.parametrize("think", [True, "high", False])
def test_thinking_uses_the_arguments_of_the_template(thinker: LLM, think: Any) -> None:
    _, request = parse_chat_request({"model": "m", "messages": WELL, "think": think}).prepare(thinker)
    arguments = thinker.template_arguments({}, think=bool(think))
    assert request.prompt_ids == thinker.prepare(ChatRequest(WELL, template_arguments=arguments)).prompt_ids


def test_a_thinking_level_reaches_a_template_with_levels(tmp_path: Path) -> None:
    template = CHATML + "{{ reasoning_effort }}"
    with localllm.load(write_scripted(tmp_path / "m", THINKING, template=template)) as llm:
        _, request = parse_chat_request({"model": "m", "messages": WELL, "think": "high"}).prepare(llm)
        assert llm.tokenizer.decode(request.prompt_ids).endswith("high")


def test_calls_have_objects_as_arguments(caller: LLM) -> None:
    made = chunks(caller, parse_chat_request({"model": "m", "messages": WELL, "tools": [TOOL]}))
    read = ollama.ChatResponse(**merge_chunks(made))
    assert read.message.content == "I call"
    [call] = read.message.tool_calls or ()
    assert call.function.name == "f" and call.function.arguments == {"a": 1}
    [raw] = merge_chunks(made)["message"]["tool_calls"]
    assert raw["id"] and raw["function"]["index"] == 0
    assert read.done_reason == "stop"


def test_a_conversation_with_a_call_is_rendered_again(caller: LLM) -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{# tools #}"
    llm = caller.with_edition(Edition("m", template=template))
    made = ollama.Message(
        role="assistant",
        thinking="hm",
        tool_calls=[{"function": {"name": "f", "arguments": {"a": {"b": [1]}}}}],  # type: ignore[list-item]
    )
    answer = {"role": "tool", "tool_name": "f", "content": "42"}
    said = [*WELL, made.model_dump(exclude_none=True), answer]
    _, request = parse_chat_request({"model": "m", "messages": said, "tools": [TOOL]}).prepare(llm)
    text = llm.tokenizer.decode(request.prompt_ids)
    assert '"arguments": {"a": {"b": [1]}}' in text and '"reasoning_content": "hm"' in text
    assert text.count('"call00000"') == 2, "the call and its answer"
    assert '"name": "f"' in text


def test_answers_find_their_calls_by_name_and_by_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")]
    tools = [{"role": "Tool", "content": str(n), "tool_name": name} for n, name in enumerate("gff")]
    read = parse_messages([{"role": "assistant", "tool_calls": calls}, *tools, {"role": "tool", "content": "x"}])
    assert [message.get("tool_call_id") for message in read[1:]] == ["call00001", "call00000", "call00002", None]


def test_a_model_without_recommendations_samples_as_in_ollama(caller: LLM, tmp_path: Path) -> None:
    with localllm.load(shared("stories260K")) as llm:
        _, request = parse_generate_request({"model": "m", "prompt": "a"}).prepare(llm)
        assert asdict(request.params) == asdict(SamplingParams(**OLLAMA_DEFAULTS))
        own = llm.with_edition(Edition("m", parameters={"temperature": 1, "stop": ["x"]}))
        _, request = parse_generate_request({"model": "m", "prompt": "a", "options": {"top_k": 3}}).prepare(own)
        assert request.params == SamplingParams(temperature=1, top_k=3, top_p=0.9, stop=("x",))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({"num_predict": 8.0}, {"max_tokens": 8}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 5, "top_k": -1}, {"seed": 5, "top_k": 0}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5, "repeat_last_n": 64}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_last_n": -1, "min_p": 0.1}, {"repeat_last_n": -1, "min_p": 0.1}),
        ({"presence_penalty": 1, "frequency_penalty": 2}, {"presence_penalty": 1, "frequency_penalty": 2}),
        ({"stop": ["a"], "temperature": None}, {"stop": ("a",)}),
    ],
)
def test_options_map_to_our_parameters(caller: LLM, options: dict[str, Any], expected: Any) -> None:
    _, request = parse_generate_request({"model": "m", "prompt": "a", "options": options}).prepare(caller)
    assert {name: getattr(request.params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *[(None, None), (0, 0), (300, 300), (-1, float("inf")), ("5m", 300), ("1h30m", 5400)],
        *[("-1s", float("inf")), ("0", 0), ("1.5s", 1.5), ("250ms", 0.25)],
    ],
)
def test_keep_alive_is_seconds_or_a_duration(given: Any, expected: float | None) -> None:
    assert parse_keep_alive(given) == expected


@pytest.mark.parametrize("given", ["3,5", "soon", "", True, [], "5 m", "1d"])
def test_other_durations_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="keep_alive"):
        parse_keep_alive(given)


def test_a_gap_is_filled_where_the_model_has_the_tokens_for_it(tmp_path: Path) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    folder = write_scripted(tmp_path / "m", ("x", "y"), before="<|fim_middle|>", special=marks)
    with localllm.load(folder) as llm:
        asked = parse_generate_request({"model": "m", "prompt": "a", "suffix": "b"})
        _, request = asked.prepare(llm)
        text = llm.tokenizer.decode(request.prompt_ids, skip_special=False)
        assert text == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
        assert merge_chunks(chunks(llm, asked))["response"] == "xy"


def test_times_are_those_of_the_standard() -> None:
    assert format_rfc3339(0) == "1970-01-01T00:00:00.000000Z"
    assert format_rfc3339(float("inf")).startswith("2255-")
    assert nanoseconds(1.5) == 1_500_000_000 and nanoseconds(float("nan")) == 0
    json.dumps(format_rfc3339(time.time()))

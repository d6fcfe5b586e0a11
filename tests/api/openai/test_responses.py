"""Answers of real models, complete and streamed, validate as the types of the `openai` package."""

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import openai.types
import pytest
from openai.types import chat as theirs
from openai.types.batch_error import BatchError
from openai.types.shared import ErrorObject

import localllm
from localllm import LLM, errors
from localllm.api.openai.requests import parse_chat_request, parse_completion_request
from localllm.api.openai.responses import (
    ChatStream,
    ResponseHeader,
    TextStream,
    chat_completion_object,
    error_object,
    text_completion_object,
    usage_chunk,
)
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.llm.llm import collect_completion
from localllm.request import Completion, GenerationEvent, Request
from tests.scripted import write_scripted
from tests.shared import shared

STAMP = ResponseHeader("id-1", 1_700_000_000, "demo", "fp_1")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
THINKING = ("<think>", "hm", " so", "</think>", "Yes", ",", " it", " is")
CALLING = ("I", " call", "<tool_call>", '{"name":', '"f","arguments":', '{"a": 1}', "}", "</tool_call>")
QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "Well?"}]}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    yield from opened(write_scripted(tmp_path_factory.mktemp("thinker"), THINKING))


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    yield from opened(write_scripted(tmp_path_factory.mktemp("caller"), CALLING))


@pytest.fixture(scope="module")
def teller() -> Iterator[LLM]:
    yield from opened(shared("stories260K"))


def opened(folder: Path) -> Iterator[LLM]:
    with localllm.load(folder, device="cpu") as llm:
        yield llm


Answered = list[tuple[Request, list[GenerationEvent], Completion]]


def answered(llm: LLM, asked: ParsedRequest) -> Answered:
    requests = asked.prepare(llm)
    events = [list(llm.submit(request)) for request in requests]
    return [(r, pieces, collect_completion(r, pieces)) for r, pieces in zip(requests, events, strict=True)]


def chat(llm: LLM, body: dict[str, Any]) -> tuple[theirs.ChatCompletion, list[theirs.ChatCompletionChunk]]:
    asked, texts = parse_chat_request(body, llm.default_params), TokenTexts(llm.tokenizer)
    [(_, events, done)] = answered(llm, asked)
    stream = ChatStream(STAMP, asked, texts)
    chunks = [
        *(chunk for event in events for chunk in stream.chunks_for(event)),
        usage_chunk(STAMP, asked, [done.metrics]),
    ]
    whole = json.loads(json.dumps(chat_completion_object(STAMP, asked, [done], texts), allow_nan=False))
    return theirs.ChatCompletion.model_validate(whole), [
        theirs.ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk, allow_nan=False)))
        for chunk in chunks
    ]


def test_content_and_thoughts(thinker: LLM) -> None:
    whole, chunks = chat(thinker, QUESTION)
    [choice] = whole.choices
    assert (whole.id, whole.created, whole.model, whole.system_fingerprint) == (
        "id-1",
        STAMP.created,
        "demo",
        "fp_1",
    )
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        "Yes, it is",
        "assistant",
        "stop",
    )
    assert choice.message.model_extra == {"reasoning_content": "hm so", "reasoning": "hm so"}
    assert choice.message.tool_calls is None and choice.logprobs is None
    assert whole.usage is not None and whole.usage.completion_tokens == len(THINKING) + 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, [delta.role for delta in deltas[1:]]) == ("assistant", [None] * (len(deltas) - 1))
    assert "".join(delta.content or "" for delta in deltas) == "Yes, it is"
    for name in ("reasoning", "reasoning_content"):
        assert "".join((delta.model_extra or {}).get(name, "") for delta in deltas) == "hm so"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_calls_of_functions(caller: LLM) -> None:
    whole, chunks = chat(caller, QUESTION | {"tools": [TOOL], "seed": 1})
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I call"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
    streamed = [call for c in chunks[:-1] for call in c.choices[0].delta.tool_calls or []]
    assert [(s.index, s.id, s.function and s.function.arguments) for s in streamed] == [
        (0, call.id, call.function.arguments)
    ]
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    again, _ = chat(caller, QUESTION | {"tools": [TOOL], "seed": 1})
    assert again.choices[0].message.tool_calls == [call]  # the id is no chance


def test_the_answer_of_an_assistant_can_be_sent_back(caller: LLM) -> None:
    whole, _ = chat(caller, QUESTION | {"tools": [TOOL], "seed": 1})
    said = whole.choices[0].message.model_dump()
    read = parse_chat_request({"model": "demo", "messages": [said]}, caller.default_params).prompts[0]
    assert read[0]["tool_calls"][0]["function"]["name"] == "f"  # type: ignore[index]


def test_log_probabilities_of_a_chat(thinker: LLM) -> None:
    whole, chunks = chat(thinker, QUESTION | {"logprobs": True, "top_logprobs": 2})
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [*THINKING, "<|im_end|>"]
    assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in logprobs.content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob > -0.1 for entry in logprobs.content)
    streamed = [c.choices[0].logprobs for c in chunks[:-1]]
    assert [entry for told in streamed if told for entry in told.content or []] == logprobs.content


def test_a_truncated_answer_reports_length_even_after_a_call(caller: LLM) -> None:
    whole, _ = chat(caller, QUESTION | {"max_tokens": 2})
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("length", "I call")


def validated(whole: dict[str, Any]) -> openai.types.Completion:
    """Validate with OpenAI's type, which does not permit the nulls that OpenAI sends for the log probabilities of
    the first prompt token and as finish reason of all chunks except the last.
    """
    whole = json.loads(json.dumps(whole, allow_nan=False))
    for choice in whole["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
            assert choice["logprobs"]["top_logprobs"][0] is None
            choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0, {}
    return openai.types.Completion.model_validate(whole)


def test_text_completions_with_echo(teller: LLM) -> None:
    body = {"model": "demo", "prompt": ["Once upon a time", "Lily ☃ saw"], "max_tokens": 5, "temperature": 0}
    asked = parse_completion_request(body | {"echo": True, "logprobs": 2}, teller.default_params)
    texts, parts = TokenTexts(teller.tokenizer), answered(teller, asked)
    whole = validated(text_completion_object(STAMP, asked, [done for *_, done in parts], texts))
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice, prompt, (request, events, done) in zip(whole.choices, body["prompt"], parts, strict=True):
        assert choice.text == prompt + done.text and choice.finish_reason == "length"
        told = choice.logprobs
        assert told and told.tokens and told.text_offset and told.token_logprobs and told.top_logprobs
        assert len(told.tokens) == len(done.prompt_ids) + 5 == len(told.token_logprobs) == len(told.text_offset)
        assert told.token_logprobs[1:] == pytest.approx(
            [p.logprob for p in (*done.prompt_logprobs, *done.logprobs)]
        )
        assert all(
            value in top.values()
            for value, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)
        )
        stream = TextStream(STAMP, asked, request, texts, choice.index)
        pieces = [validated(chunk).choices[0] for event in events for chunk in stream.chunks_for(event)]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [t for piece in pieces if piece.logprobs for t in piece.logprobs.tokens or ()] == told.tokens
        assert [
            t for piece in pieces if piece.logprobs for t in piece.logprobs.text_offset or ()
        ] == told.text_offset
    assert "bytes:\\xe2" in (whole.choices[1].logprobs.tokens or [])  # type: ignore[union-attr]
    assert whole.usage is not None and whole.usage.completion_tokens == 10


def test_offsets_point_into_the_text(teller: LLM) -> None:
    asked = parse_completion_request(
        {"model": "demo", "prompt": "x", "max_tokens": 9, "logprobs": 0}, teller.default_params
    )
    texts, parts = TokenTexts(teller.tokenizer), answered(teller, asked)
    [choice] = validated(text_completion_object(STAMP, asked, [done for *_, done in parts], texts)).choices
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.text_offset
    assert choice.logprobs.text_offset == [0, *accumulate(map(len, choice.logprobs.tokens))][:9]
    assert "".join(choice.logprobs.tokens) == choice.text


def test_errors_have_the_fields_that_clients_read() -> None:
    overflow = error_object(errors.ContextOverflow(100, 64, "give --context 200"))["error"]
    assert (overflow["n_prompt_tokens"], overflow["n_ctx"]) == (100, 64)
    for error, kind, code in (
        (errors.ContextOverflow(100, 64, "x"), "invalid_request_error", "context_length_exceeded"),
        (errors.UsageError("no"), "invalid_request_error", None),
        (errors.ModelNotFound("no"), "not_found_error", "model_not_found"),
        (errors.LocalLLMError("no"), "api_error", None),
        (errors.DoesNotFit("no"), "api_error", None),
    ):
        found = error_object(error)["error"]
        assert (found["type"], found["code"], found["message"]) == (kind, code, str(error))
        ErrorObject.model_validate(found)
        BatchError.model_validate(found)

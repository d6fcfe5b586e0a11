"""Streams byte for byte, and clients that disconnect."""

import json
import socket
import time
from urllib.parse import urlsplit

import httpx2
import pytest

from localllm import LLM, SamplingParams
from localllm.api.openai.responses import ChatStream, ResponseHeader, TextStream
from localllm.api.parsed_request import ParsedRequest
from localllm.request import EventType, FinishReason, GenerationEvent, Request, TokenLogprob, ToolCall
from localllm.runtime.sequence import Sequence
from localllm.server.streaming import TextTemplate, sse_event

ASKED = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LONG = ASKED | {"max_tokens": 1000}


def check_cancelled(llm: LLM, sequences: list[Sequence]) -> None:
    """Check that the engine becomes idle before the answers end, and that all blocks are free."""
    deadline = time.monotonic() + 60
    while llm.worker.call(lambda: llm.worker.engine.has_unfinished_requests):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    llm.worker.call(llm.worker.engine.pool.check_all_free)
    assert not llm.worker.outputs
    assert all(sequence.prompt_len < len(sequence.token_ids) < sequence.max_len for sequence in sequences)


def test_a_stream_is_events_of_one_line_each_and_ends_with_done(demo_url):
    answer = httpx2.post(f"{demo_url}/v1/completions", json=ASKED | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and event.count(b"\n") == 0 for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("prompt", ["One", ["One", "Two", "Three"]])
def test_leaving_a_stream_frees_its_blocks(demo_url, demo, prompt):
    asked = LONG | {"prompt": prompt, "stream": True}
    with httpx2.stream("POST", f"{demo_url}/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        sequences = list(demo.worker.outputs)
    assert len(sequences) == (1 if prompt == "One" else 3)
    check_cancelled(demo, sequences)


def test_blocks_are_free_a_quarter_of_a_second_after_a_reader_left(demo_url, demo):
    took = list[float]()
    while min(took, default=1) >= 0.25 and len(took) < 20:  # the machine may be busy with something else
        with httpx2.stream("POST", f"{demo_url}/v1/completions", json=LONG | {"stream": True}) as answer:
            next(answer.iter_lines())
            under_way = demo.stats().used_blocks
            start = time.monotonic()
        while demo.stats().used_blocks and time.monotonic() < start + 10:
            time.sleep(0.001)
        if under_way:
            took.append(time.monotonic() - start)
    assert min(took) < 0.25
    assert demo.stats().running == 0


def test_leaving_before_a_full_answer_frees_its_blocks(demo_url, demo):
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    parts = urlsplit(demo_url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head.encode() + body)
        while not (sequences := [s for s in list(demo.worker.outputs) if len(s.token_ids) > s.prompt_len]):
            time.sleep(0.005)
    check_cancelled(demo, sequences)


TEXTS = ["a", " b", 'quotes " and \\', "line\nbreak\t\x07", "ü 🙂 \u2028", "%s {0}"]


@pytest.mark.parametrize("kind", [EventType.CONTENT, EventType.REASONING])
def test_a_filled_template_has_the_bytes_of_the_whole_event(kind):
    """Also for a model whose name looks like JSON."""
    header = ResponseHeader("id", 1, 'a "name"', None)
    chat = ParsedRequest("x", ([],), SamplingParams(), is_chat=True)
    text = ParsedRequest("x", ("Once",), SamplingParams(), is_chat=False)
    prepared = Request((1,), SamplingParams(), 0.0)
    for stream in (ChatStream(header, chat, None), TextStream(header, text, prepared, None, 3)):
        stream.chunks_for(GenerationEvent(1, "the first, with a role", (1,)))
        template = TextTemplate(lambda text, stream=stream: stream.text_chunk(kind, text))
        for text in TEXTS:
            event = GenerationEvent(1, text, (1,), kind=kind)
            assert stream.has_text_alone(event)
            assert template.fill(text) == b"".join(map(sse_event, stream.chunks_for(event)))


def test_events_with_more_than_text_are_not_filled_into_a_template():
    header, entry = ResponseHeader("id", 1, "demo", None), TokenLogprob(1, -0.5, ())
    events = [
        GenerationEvent(1, "", (1,)),
        GenerationEvent(1, "a", (1,), (entry,)),
        GenerationEvent(1, "a", finish_reason=FinishReason.STOP),
        GenerationEvent(1, tool_call=ToolCall("f", "{}", "1"), kind=EventType.TOOL_CALL),
    ]
    chat = ChatStream(header, ParsedRequest("x", ([],), SamplingParams(), is_chat=True), None)
    assert not chat.has_text_alone(GenerationEvent(1, "a", (1,)))  # its first chunk has the role
    chat.chunks_for(GenerationEvent(1, "a", (1,)))
    assert not any(map(chat.has_text_alone, events))
    timed = ParsedRequest("x", ([],), SamplingParams(), is_chat=True, timings_per_token=True)
    stream = ChatStream(header, timed, None)
    stream.chunks_for(GenerationEvent(1, "a", (1,)))
    assert not stream.has_text_alone(GenerationEvent(1, "a", (1,)))
    prepared = Request((1,), SamplingParams(), 0.0)
    for parsed in (
        ParsedRequest("x", ("Once",), SamplingParams(), is_chat=False, echo=True),
        ParsedRequest("x", ("Once",), SamplingParams(logprobs=0), is_chat=False),
    ):
        assert not TextStream(header, parsed, prepared, None).has_text_alone(GenerationEvent(1, "a", (1,)))

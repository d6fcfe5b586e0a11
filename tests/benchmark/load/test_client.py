"""One request to servers with every kind of answer, correct and faulty."""

import asyncio
import itertools
import json
import math
import threading

import httpx2
import pytest

from localllm.benchmark.load.client import SERVER_APIS, LoadClient, LoadRequest, normalize_url
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.errors import NetworkError, UsageError
from tests.benchmark.load.scripted_server import DONE, Reply, ScriptedServer, completions, event, text, usage

ASK = LoadRequest("one two", max_tokens=5)


def ask(url: str, api: str = "completions", timeout_s: float = 5, wanted: LoadRequest = ASK) -> RequestOutcome:
    """Send with a clock that advances at every reading: at sending, then at each message."""
    ticks = itertools.count(100)

    async def once() -> RequestOutcome:
        async with LoadClient(url, timeout_s, clock=lambda: float(next(ticks))) as client:
            return await client.send(SERVER_APIS[api], "m", wanted, arrival=99.0)

    return asyncio.run(once())


def answered(*parts: bytes, api: str = "completions", **reply) -> RequestOutcome:
    with ScriptedServer(lambda path, body: Reply(parts, **reply)) as server:
        return ask(server.url, api)


def test_times_are_those_of_pieces_with_text_and_counts_are_the_servers():
    said = answered(text(""), text("a b"), text("c"), text("", "stop"), usage(7, 4), DONE)
    assert said == RequestOutcome(
        arrival=99,
        sent_at=100,
        piece_times=(102, 103),
        ended_at=104,
        prompt_tokens=7,
        output_tokens=4,
        counted_by="usage",
    )
    assert (said.late_s, said.ttft_s, said.itl_s, said.e2e_s) == (1, 3, [1], 5)
    assert said.tpot_s == pytest.approx(2 / 3) and said.tokens_per_s == pytest.approx(1.5)


def test_neither_a_sign_of_life_nor_an_error_that_is_null_is_a_fault():
    alive = [b"event: ping\r\n\r\n", b": ping\n\n", b"id: 3\n\n"]
    end = event({"choices": [{"text": "b", "finish_reason": "stop"}], "error": None})
    said = answered(text("a"), *alive, end, usage(3, 2), DONE)
    assert said.ok and said.output_tokens == 2


def test_without_usage_an_answer_cut_by_its_limit_counts_the_limit():
    said = answered(text("a b"), text("c", "length"), DONE)
    assert (said.output_tokens, said.counted_by, said.prompt_tokens) == (5, "limit", None)


def test_without_usage_pieces_are_not_counted_as_tokens():
    said = answered(text("a b"), text("c", "stop"), DONE)
    assert said.ok and (said.output_tokens, said.counted_by) == (None, None)
    assert math.isnan(said.tpot_s) and said.ttft_s == 2


def test_a_chat_brings_thoughts_content_and_calls():
    def delta(**said: object) -> bytes:
        return event({"choices": [{"delta": said, "finish_reason": None}]})

    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    end = event({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": None})
    said = answered(
        *(delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="x")),
        *(delta(tool_calls=call), end, usage(2, 3), DONE),
        api="chat",
    )
    assert (said.piece_times, said.ended_at, said.output_tokens) == ((102, 103, 104), 105, 3)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_ollama_lines_are_read_across_chunk_borders(size):
    lines = [
        {"response": "a", "done": False},
        {"response": " \u2028b", "done": False},
        {"response": "", "done": True, "done_reason": "length", "prompt_eval_count": 4, "eval_count": 9},
    ]
    whole = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    said = answered(*parts, api="ollama-generate", kind="application/x-ndjson")
    assert said == RequestOutcome(99, 100, (101, 102), 103, 4, 9, "usage")


def test_ollama_chats_bring_messages():
    lines = [
        {"message": {"content": "a"}, "done": False},
        {"message": {"content": ""}, "done": True, "eval_count": 1},
    ]
    said = answered(*(json.dumps(line).encode() + b"\n" for line in lines), api="ollama-chat")
    assert (said.piece_times, said.ended_at, said.output_tokens) == ((101,), 102, 1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply([b'{"error": {"message": "busy"}}'], 503, "application/json"), "HTTP 503: busy"),
        (Reply([b"<html>"], 502, "text/html"), "HTTP 502"),
        (Reply(status=307, headers={"Location": "http://127.0.0.1:9/"}), "HTTP 307"),
        (Reply([text("a")]), "the answer was cut off"),
        (Reply([text("a"), event({"error": {"message": "out of memory"}})]), "in the stream: out of memory"),
        (Reply([text("a"), event(b"{")]), "a message is not JSON"),
        (Reply([event([1])]), "a message is not a JSON object"),
        (Reply([b"data: " + b"x" * (2 << 20)]), "SSEError: Server-sent event exceeded the 1048576 byte limit."),
    ],
)
def test_faults_are_outcomes_by_kind(reply, error):
    with ScriptedServer(lambda path, body: reply) as server:
        said = ask(server.url)
    assert (said.error, said.ok) == (error, False)


def test_an_endless_line_is_not_buffered():
    assert answered(*[b"x" * 65536] * 40, api="ollama-generate").error == "a message is too long"


def test_a_silent_server_times_out():
    silence = threading.Event()

    def parts():
        yield text("a")
        silence.wait(10)

    with ScriptedServer(lambda path, body: Reply(parts())) as server:
        said = ask(server.url, timeout_s=0.3)
        silence.set()
    assert said.error == "time-out" and len(said.piece_times) == 1


def test_an_unreachable_server_is_reported():
    with ScriptedServer(completions) as server:
        pass
    assert ask(server.url).error == "no connection"


def test_requests_have_the_form_of_each_api():
    bodies = {api: wire.make_body("m", ASK) for api, wire in SERVER_APIS.items()}
    assert bodies["completions"] == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert bodies["chat"]["messages"] == [{"role": "user", "content": "one two"}]
    assert bodies["ollama-generate"] == {
        "model": "m",
        "prompt": "one two",
        "raw": True,
        "stream": True,
        "options": {"num_predict": 5, "temperature": 0},
    }
    assert bodies["ollama-chat"]["messages"] == bodies["chat"]["messages"]
    assert SERVER_APIS["chat"].make_body("m", LoadRequest("x", 1, ignore_eos=True))["ignore_eos"] is True


@pytest.mark.parametrize(
    ("path", "listing", "api", "model"),
    [
        ("/v1/models", {"data": [{"id": "first"}, {"id": "second"}]}, "completions", "first"),
        ("/api/tags", {"models": [{"name": "first:latest"}]}, "ollama-generate", "first:latest"),
    ],
)
def test_the_server_kind_and_its_model_are_detected(path, listing, api, model):
    def answer(at, body):
        return Reply([json.dumps(listing).encode()], 200 if at == path else 404, "application/json")

    async def meet(url):
        async with LoadClient(url, 5) as client:
            found = await client.detect_api()
            return found, await client.first_model(SERVER_APIS[found])

    with ScriptedServer(answer) as server:
        assert asyncio.run(meet(server.url)) == (api, model)


def test_a_server_of_another_kind_is_reported():
    async def meet(url):
        async with LoadClient(url, 5) as client:
            await client.detect_api()

    with (
        ScriptedServer(lambda path, body: Reply([b"hello"], kind="text/html")) as server,
        pytest.raises(NetworkError, match="neither /v1/models nor /api/tags"),
    ):
        asyncio.run(meet(server.url))


def test_proxies_of_the_environment_are_passed_by(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert answered(text("a", "stop"), DONE).ok


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://a:b@x", "http://x/?q=1", "http://[::1"]
)
def test_an_invalid_address_is_rejected(url):
    with pytest.raises(UsageError, match="not a server's address"):
        normalize_url(url)


def test_an_address_may_end_as_openai_clients_write_it():
    assert normalize_url("http://x:1/v1/") == normalize_url("http://x:1") == "http://x:1"
    assert httpx2.URL(normalize_url("http://[::1]:8")).port == 8

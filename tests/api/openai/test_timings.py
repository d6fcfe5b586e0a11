"""`timings_per_token` reports what the engine measured."""

import pytest

import localllm
from localllm import LLM
from localllm.api.openai.requests import parse_chat_request
from localllm.api.openai.responses import ChatStream, JsonObject, ResponseHeader
from localllm.api.tokens import TokenTexts
from localllm.request import GenerationEvent

STAMP = ResponseHeader("chatcmpl-1", 0, "demo")
BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Say ding dong ding dong ding dong ding dong."}],
    "temperature": 0,
    "stream": True,
}


@pytest.fixture(scope="module")
def demo():
    with localllm.load("demo") as llm:
        yield llm


def told(llm: LLM, body: JsonObject) -> tuple[list[GenerationEvent], list[JsonObject]]:
    """Return the events of an answer, and its chunks."""
    asked = parse_chat_request(body, llm.default_params)
    writer = ChatStream(STAMP, asked, TokenTexts(llm.tokenizer))
    events = list(llm.submit(asked.prepare(llm)[0]))
    return events, [chunk for event in events for chunk in writer.chunks_for(event)]


def test_each_chunk_has_timings_and_the_last_has_the_totals(demo):
    events, chunks = told(demo, {**BODY, "timings_per_token": True})
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    metrics = events[-1].metrics
    assert metrics is not None
    assert sorted(set(counts) - {0}) == list(range(1, metrics.output_tokens + 1))
    last = chunks[-1]["timings"]
    assert last["prompt_n"] + last["cache_n"] == metrics.prompt_tokens
    assert (last["draft_n"], last["draft_n_accepted"]) == (metrics.draft_tokens, metrics.accepted_tokens)
    assert last["ttft_ms"] == metrics.ttft_s * 1e3
    assert last["predicted_per_second"] == metrics.tokens_per_s


def test_what_could_not_be_measured_is_null(demo):
    _, chunks = told(demo, {**BODY, "timings_per_token": True, "max_tokens": 1})
    assert chunks[-1]["timings"]["predicted_per_second"] is chunks[-1]["timings"]["itl_p99_ms"] is None


def test_timings_are_sent_only_on_request(demo):
    assert all("timings" not in chunk for chunk in told(demo, BODY)[1])

"""Server metrics and tokenization, compared with the model itself."""

import json
import time

import httpx2
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import localllm
from localllm import LLM
from localllm.metrics import Metrics
from localllm.request import ChatRequest
from localllm.server.models import ModelPool
from localllm.server.prometheus import ITL_BUCKETS_S, ServerMetrics
from tests.server.conftest import serving

MESSAGES = [{"role": "user", "content": "What is a cat?"}]
ASKED = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def url(demo):
    """URL of a server without previous requests."""
    with serving(demo) as url:
        yield url


def samples(url):
    """Samples of the metrics by name and labels."""
    page = httpx2.get(f"{url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("localllm_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def ask(url, path, **body):
    answer = httpx2.post(url + path, json=body, timeout=30)
    return answer.status_code, answer.json()


def test_answers_are_added_up(url):
    usages = [ask(url, "/v1/completions", **ASKED)[1]["usage"] for _ in range(3)]
    found, demo = samples(url), ("model", "demo")
    assert found["answers_total", ("finish_reason", "length"), demo] == 3
    assert found["prompt_tokens_total", demo] == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found["cached_tokens_total", demo] == cached
    assert found["output_tokens_total", demo] == 36
    for name in ("time_to_first_token", "queue", "prefill", "e2e"):
        assert found[f"{name}_seconds_count", demo] == found[f"{name}_seconds_bucket", ("le", "+Inf"), demo] == 3
    assert found["inter_token_latency_seconds_count", demo] == 33
    assert 0 < found["time_to_first_token_seconds_sum", demo] <= found["e2e_seconds_sum", demo]
    route = ("method", "POST"), ("route", "/v1/completions"), ("status", "200")
    assert found[("http_request_seconds_count", *route)] == 3
    assert found["kv_blocks", demo] > found["kv_blocks_used", demo] == 0
    assert found["running", demo] == found["waiting", demo] == 0
    assert found["models_loaded",] == 1
    assert found["preemptions_total", demo] == found["kv_blocks_evicted_total", demo] == 0


def test_gaps_between_tokens_have_the_histogram_of_the_prometheus_client():
    own, registry = ServerMetrics(ModelPool(lambda source, context: None)), CollectorRegistry()
    help_text = "Time between consecutive tokens of an answer."
    name, buckets = "localllm_inter_token_latency_seconds", ITL_BUCKETS_S
    reference = Histogram(name, help_text, ["model"], buckets=buckets, registry=registry)
    for model, gaps in (("a", (0.0, 0.001, 0.0011, 2.5, 3.0)), ("b", (0.04,)), ("a", (0.3, 0.25))):
        own.answer_ended(model, "stop", 1, Metrics(1, 0, 1 + len(gaps), 0.1, 0, 0.1, 0.1, gaps, 1.0, 0), 0)
        for gap in gaps:
            reference.labels(model).observe(gap)
    lines = [line for line in own.exposition().decode().splitlines() if name in line]
    assert lines == generate_latest(registry).decode().splitlines()


def test_an_abandoned_answer_counts_its_tokens(url, demo):
    with httpx2.stream(
        "POST", f"{url}/v1/completions", json=ASKED | {"stream": True, "max_tokens": 900}
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        assert samples(url)["running", ("model", "demo")] == 1
    end = time.monotonic() + 60
    while not (left := samples(url).get(("answers_total", ("finish_reason", "cancelled"), ("model", "demo")))):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert left == 1
    assert 3 <= samples(url)["output_tokens_total", ("model", "demo")] < 900
    assert samples(url)["prompt_tokens_total", ("model", "demo")] == len(
        demo.prepare(ChatRequest(ASKED["prompt"])).prompt_ids
    )


def test_requests_cannot_create_labels(url):
    with httpx2.Client() as client:
        for place in range(5):
            client.request(f"M{place}", f"{url}/v1/models")
            client.get(f"{url}/no/such/{place}")
            client.get(f"{url}/v1/models/nobody-{place}")
            client.post(f"{url}/v1/completions", json=ASKED | {"model": f"nobody-{place}"})
    page = httpx2.get(f"{url}/metrics").text
    assert "nobody" not in page and "M3" not in page and "such" not in page
    others = [
        value
        for key, value in samples(url).items()
        if key[0] == "http_request_seconds_count" and "other" in str(key)
    ]
    assert sum(others) >= 10


def test_tokens_of_a_prompt_and_of_messages_are_those_that_the_model_reads(demo_url: str, demo: LLM):
    ids = list(demo.prepare(ChatRequest("Once upon a time")).prompt_ids)
    assert ask(demo_url, "/v1/tokenize", model="demo", prompt="Once upon a time") == (
        200,
        {"count": len(ids), "max_model_len": demo.context, "tokens": ids, "token_strs": None},
    )
    chat = list(demo.prepare(ChatRequest(MESSAGES)).prompt_ids)
    _, said = ask(demo_url, "/v1/tokenize", model="demo", messages=MESSAGES, return_token_strs=True)
    assert said["tokens"] == chat and len(said["token_strs"]) == len(chat)
    _, rendered = ask(demo_url, "/v1/apply-template", model="demo", messages=MESSAGES)
    assert rendered == {"prompt": demo.tokenizer.decode(chat, skip_special=False), "tokens": chat}
    assert ask(demo_url, "/v1/detokenize", model="demo", tokens=chat) == (200, {"prompt": rendered["prompt"]})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/v1/tokenize", {"prompt": 3}, "prompt"),
        ("/v1/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/v1/detokenize", {"tokens": ["3"]}, "tokens.0"),
        ("/v1/apply-template", {"messages": []}, "messages"),
    ],
)
def test_invalid_fields_are_named(demo_url, path, body, param):
    status, said = ask(demo_url, path, model="demo", **body)
    assert (status, said["error"]["param"]) == (400, param)


def test_models_that_are_not_loaded_are_listed_and_not_loaded_for_it(stories_url):
    listed = {model["id"]: model for model in httpx2.get(f"{stories_url}/v1/models").json()["data"]}
    assert (listed["stories260K"]["loaded"], listed["demo"]["loaded"]) == (True, False)
    assert listed["demo"] == httpx2.get(f"{stories_url}/v1/models/demo").json()
    assert listed["demo"]["context_length"] is None
    assert json.loads(httpx2.get(f"{stories_url}/health").text)["models"] == ["stories260K"]


def test_health_is_bad_once_an_engine_has_ended():
    with localllm.load("demo", context=256) as llm, serving(llm) as url:
        assert httpx2.get(f"{url}/health").status_code == 200
        llm.worker.stop_after_failure(RuntimeError("CUDA error: an illegal memory access was encountered"))
        answer = httpx2.get(f"{url}/health")
        assert answer.status_code == 503 and "restart the server" in answer.json()["error"]["message"]
        asked = {"model": "demo", "prompt": "Once", "stream": True}
        assert httpx2.post(f"{url}/v1/completions", json=asked).status_code == 500

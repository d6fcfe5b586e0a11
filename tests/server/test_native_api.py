"""`/localllm/top` reports what the engine does."""

import time
from contextlib import closing

import httpx2
import pytest

from localllm import SamplingParams
from localllm.client.server import ServerClient
from localllm.server.lease import LoadedModel
from localllm.server.native_api import model_status
from localllm.tui.top_board import fetch_snapshot, throughput_between
from tests.server.conftest import serving

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=300)
ASKED = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def url(demo):
    """URL of a server without previous requests."""
    with serving(demo) as url:
        yield url


@pytest.fixture
def server(url):
    with closing(ServerClient(url)) as server:
        yield server


def test_requests_are_shown_as_they_are(demo, server):
    stream = demo.stream("A fox", LONG)
    for _ in range(5):
        next(stream)
    seen = fetch_snapshot(server).models[0]
    slot = next(slot for slot in seen.slots if slot.id == stream.output.sequence.request.id)
    prompt = len(stream.output.sequence.request.prompt_ids)
    assert seen.running == 1 and not slot.waiting
    assert slot.prompt_tokens == prompt
    assert slot.output_tokens >= 5 and prompt <= slot.computed <= prompt + 300  # with drafts under way
    assert slot.blocks >= slot.computed / demo.stats().block_tokens
    assert slot.tokens_per_s and slot.age_s > 0
    stream.close()
    while fetch_snapshot(server).models[0].slots:
        time.sleep(0.01)


def test_two_snapshots_give_the_rates(url, server):
    before = fetch_snapshot(server)
    assert throughput_between(None, before, "demo") is None
    assert httpx2.post(f"{url}/v1/completions", json=ASKED).status_code == 200
    now = fetch_snapshot(server)
    found = throughput_between(before, now, "demo")
    assert found and found.output_per_s * (now.at - before.at) == pytest.approx(12)
    idle = throughput_between(now, fetch_snapshot(server), "demo")
    assert idle and idle.output_per_s == 0 and idle.found is None


def test_the_newest_answers_are_measured(url, server):
    for _ in range(2):
        httpx2.post(f"{url}/v1/completions", json=ASKED)
    seen = fetch_snapshot(server).models[0]
    assert seen.recent["answers"] == 2
    p50, p95, p99 = seen.percentiles("ttft")
    assert 0 < p50 <= p95 <= p99
    assert seen.percentiles("itl")[0] > 0


def test_both_apis_report_one_model_alike(demo, url):
    told = httpx2.get(f"{url}/localllm/top").json()["models"][0]
    assert told.keys() > model_status(LoadedModel("key", "demo", demo, 1.0)).keys()

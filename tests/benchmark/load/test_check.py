"""`simulate --check`: a load sent to a server, and its simulation with the same arrivals and lengths."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.benchmark.load.check import CheckRow, as_dict, check_server, format_check, keep_check
from localllm.errors import NetworkError, UsageError
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.runtime.step import StepShape
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.target import Target, roofline_target
from localllm.simulate.traces import read_trace
from tests.benchmark.load.scripted_server import DONE, Body, Reply, ScriptedServer, completions, text, usage
from tests.plan.published import LLAMA_8B, header_of

PREFILL_S, DECODE_S, ANSWER = 0.06, 0.02, 6


class FixedCost:
    source = "made up"

    def seconds(self, shape: StepShape, number: int) -> float:
        return PREFILL_S if shape.prompts else DECODE_S

    def totals(self) -> None:
        return None


@pytest.fixture
def target() -> Target:
    options = LoadOptions(4096, 1, None, "auto", "auto")
    roofline = roofline_target(header_of(LLAMA_8B), find_device("h100"), options, name="m")
    return replace(roofline, make_cost=FixedCost)


def paced(path: str, body: Body | None) -> Reply:
    """A server that takes these durations, and counts two tokens a word."""
    if body is None:
        return completions(path, body)
    prompt = 2 * len(body["prompt"].split())
    if not body["stream"]:
        return Reply([json.dumps({"usage": {"prompt_tokens": prompt}}).encode()], kind="application/json")

    def parts():
        time.sleep(PREFILL_S)
        for n in range(body["max_tokens"]):
            if n:
                time.sleep(DECODE_S)
            yield text("a", "length" if n == body["max_tokens"] - 1 else None)
        yield usage(prompt, body["max_tokens"])
        yield DONE

    return Reply(parts())


def load(**changes: object) -> LoadPlan:
    plan = LoadPlan(rate=6.0, requests=10, prompt=Lengths(40), output=Lengths(ANSWER), system=20)
    return replace(plan, **changes)


def test_prediction_beside_measurement(target: Target, tmp_path: Path) -> None:
    with ScriptedServer(paced) as server:
        check, simulated = check_server(server.url, load(), target)
        prompts = [body["prompt"].split() for _, body in server.asked]
    assert (check.requests, check.failed, check.model) == (10, 0, "m")
    assert {len(words) for words in prompts} == {30}  # 60 tokens
    assert len({" ".join(words[:10]) for words in prompts}) == 1  # the system prompt
    assert set(simulated.records.prompt) == {60} and set(simulated.records.output) == {ANSWER}
    rows = {row.name: row for row in check.rows}
    # a busy machine sleeps longer than it was told, never shorter
    assert rows["ttft_p50_s"].measured > 0.9 * PREFILL_S and rows["tpot_p50_s"].measured > 0.9 * DECODE_S
    assert rows["ttft_p50_s"].predicted >= PREFILL_S and rows["tpot_p50_s"].predicted >= DECODE_S
    keep_check(tmp_path, check, pytest.fail)
    keep_check(tmp_path, check, pytest.fail)
    kept = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert len(kept) == 2 and kept[0]["figures"].keys() == rows.keys()
    shown = format_check(check)
    assert "TTFT p50" in shown and "output tokens/s" in shown and "step times: made up" in shown


def test_blocks_that_prompts_of_a_trace_share_are_sent_and_simulated(target: Target, tmp_path: Path) -> None:
    """Prompts begin with the same one to three blocks of 512 tokens; the server adds ten to each."""
    lengths = [(1024 + 100, [7, 8, 9]), (512 + 30, [7, 4]), (1024 + 300, [7, 8, 5]), (1024 + 100, [7, 8, 9])]
    lines = [
        {"timestamp": 200 * n, "input_length": length, "output_length": ANSWER, "hash_ids": ids}
        for n, (length, ids) in enumerate(lengths)
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    name, trace = read_trace(file)
    assert name == "Mooncake"

    def adding(path: str, body: Body | None) -> Reply:
        reply = paced(path, body)
        if not body or not body["stream"]:
            return reply
        parts = list(reply.parts)
        return Reply([*parts[:-2], usage(2 * len(body["prompt"].split()) + 10, body["max_tokens"]), DONE])

    with ScriptedServer(adding) as server:
        _, simulated = check_server(server.url, LoadPlan(trace=trace, requests=len(trace)), target)
        prompts = [body["prompt"].split() for _, body in server.asked]
    assert [len(prompt) for prompt in prompts] == [562, 271, 662, 562]
    assert prompts[0][:256] == prompts[1][:256] and prompts[0][:512] == prompts[2][:512] != prompts[1][:512]
    assert prompts[3] == prompts[0]
    assert sorted(simulated.records.prompt) == [552, 1134, 1134, 1334]
    # 512 tokens of the second prompt, 1,024 of the third, and all blocks of the fourth before its last token
    assert simulated.records.cached.tolist() == [0, 512, 1024, 1120]


def test_closed_loop_sends_at_most_as_many_as_users(target: Target) -> None:
    plan = load(rate=None, users=2, think_s=0.01, requests=6, system=0)
    with ScriptedServer(paced) as server:
        check, _ = check_server(server.url, plan, target)
        assert server.most_under_way == 2
    assert check.requests == 6


def test_failures_are_counted(target: Target) -> None:
    def failing(path: str, body: Body | None) -> Reply:
        if body and body["stream"] and len(server.asked) in (1, 2):
            return Reply([b"{}"], 500)
        return paced(path, body)

    with ScriptedServer(failing) as server:
        check, _ = check_server(server.url, load(requests=5), target)
    assert (check.requests, check.failed) == (3, 2)


def test_refusals(target: Target) -> None:
    with pytest.raises(UsageError, match="--check cannot send conversations"):
        check_server("http://127.0.0.1:1", load(turns=2), target)
    with pytest.raises(NetworkError):
        check_server("http://127.0.0.1:1", load(), target)


def test_json_has_no_nan(target: Target) -> None:
    """Answers of one token have no TPOT."""
    with ScriptedServer(paced) as server:
        check, _ = check_server(server.url, load(requests=2, output=Lengths(1)), target)
    found = json.loads(json.dumps(as_dict(check), allow_nan=False))
    assert found["figures"]["tpot_p50_s"]["measured"] is None
    assert CheckRow("x", 2.0, 1.0).error == 1.0

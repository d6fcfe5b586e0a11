"""Load tests of scripted servers and our own, checked by counts and order alone."""

import asyncio
import csv
import io
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import threading

import pytest

from localllm.benchmark.load import report
from localllm.benchmark.load.client import LoadRequest
from localllm.benchmark.load.drive import Load, LoadRound, generate_load, poisson_arrivals
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.run import LoadPlan, generate_prompts, measure_servers
from localllm.cli.app import main
from localllm.errors import UsageError
from tests.benchmark.load.scripted_server import Reply, ScriptedServer, completions
from tests.server.conftest import serving, stories  # noqa: F401 (a fixture)


def words_of(server: ScriptedServer) -> list[str]:
    return [body["prompt"] for _, body in server.asked]


def quietly(text: str) -> None:
    pass


def test_arrivals_are_a_poisson_process_of_their_rate_and_the_same_for_the_same_seed():
    times = list(itertools.islice(poisson_arrivals(7, 50.0), 20_000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.03)  # of an exponential, the mean
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    assert times == list(itertools.islice(poisson_arrivals(7, 50.0), 20_000))
    assert times[:5] != list(itertools.islice(poisson_arrivals(8, 50.0), 5))


def test_open_arrivals_come_when_they_are_due_and_wait_for_no_answer():
    now, sent = 0.0, []

    async def load() -> LoadRound:
        round, all_sent = LoadRound(0.0), asyncio.Event()

        async def send(ask: LoadRequest, arrival: float) -> RequestOutcome:
            sent.append(arrival)
            if len(sent) == 30:
                all_sent.set()
            await all_sent.wait()  # no answer before the last request
            return RequestOutcome(arrival, arrival, ended_at=arrival)

        asks = (LoadRequest("x", 1) for _ in itertools.count())
        await asyncio.wait_for(generate_load(round, Load(30, rate=1e6), asks, send, 3, lambda: now), 60)
        return round

    round = asyncio.run(load())
    assert sent == list(itertools.islice(poisson_arrivals(3, 1e6), 30))
    assert round.in_flight == list(range(30))
    assert round.unanswered == 0


def test_a_closed_loop_has_so_many_users_and_no_more():
    together = threading.Barrier(4)

    def answer(path, body):
        if body and body["stream"]:
            together.wait(60)  # answers only where four ask at once
        return completions(path, body)

    with ScriptedServer(answer) as server:
        result = measure_servers(LoadPlan(Load(12, concurrency=4), rounds=1), [server.url], None, None, quietly)
    assert server.most_under_way == 4
    measured = result.measures(result.targets[0])
    assert (len(measured.answered), measured.max_in_flight) == (12, 4)


def test_a_duration_ends_the_arrivals_and_not_the_answers():
    now = itertools.count(0.0, 0.1)

    async def load() -> LoadRound:
        round = LoadRound(0.0)

        async def send(ask: LoadRequest, arrival: float) -> RequestOutcome:
            await asyncio.sleep(0)
            return RequestOutcome(arrival, arrival, ended_at=arrival + 5)

        asks = (LoadRequest("x", 1) for _ in itertools.count())
        await generate_load(round, Load(None, 1.0, concurrency=2), asks, send, 0, lambda: next(now))
        return round

    round = asyncio.run(load())
    assert 2 <= len(round.outcomes) <= 10
    assert all(outcome.arrival <= 1.1 for outcome in round.outcomes) and round.unanswered == 0


def test_servers_get_the_same_requests_in_turn_and_others_in_each_round():
    order = []

    def noting(name):
        def answer(path, body):
            if body and body["stream"]:
                order.append(name)
            return completions(path, body)

        return answer

    with ScriptedServer(noting("a")) as a, ScriptedServer(noting("b")) as b:
        plan = LoadPlan(Load(3), prompt=20, output=3, rounds=3)
        result = measure_servers(plan, [a.url, b.url], None, None, quietly)
    assert [key for key, _ in itertools.groupby(order)] == ["a", "b", "a", "b"]
    assert words_of(a) == words_of(b)
    assert len(set(words_of(a))) == 9
    assert {len(prompt.split()) for prompt in words_of(a)} == {20}
    found = report.as_dict(result)
    assert [server["answers"] for server in found["servers"]] == [9, 9]
    assert [server["output_tokens"] for server in found["servers"]] == [27, 27]
    assert found["servers"][0]["prompt_tokens"]["mean"] == 20
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    rows = list(csv.DictReader(io.StringIO(report.as_csv(result))))
    assert [row["url"] for row in rows] == [a.url, b.url]


def test_prompts_have_the_tokens_that_the_server_counts():
    def four_a_word(path, body):
        reply = completions(path, body)
        if body and not body["stream"]:
            counts = {"prompt_tokens": 4 * len(body["prompt"].split())}
            reply.parts = [json.dumps({"usage": counts}).encode()]
        return reply

    with ScriptedServer(four_a_word) as server:
        measure_servers(
            LoadPlan(Load(2), prompt=100, shared_prefix=40, rounds=2), [server.url], None, None, quietly
        )
    told = [prompt.split() for prompt in words_of(server)]
    assert {len(words) for words in told} == {25}
    assert len({" ".join(words[:10]) for words in told}) == 1
    assert len({words[10] + words[11] + words[12] for words in told}) > 1


def test_prompts_from_a_text_are_pieces_of_it_with_beginnings_of_their_own():
    text = [f"w{place}" for place in range(50)]
    first, second = itertools.islice(generate_prompts(1, 12, text), 2)
    start = text.index(first.split()[4])
    assert first.split()[4:] == [text[(start + place) % 50] for place in range(8)]
    assert first.split()[:4] != second.split()[:4]


def test_our_server_is_measured_with_its_own_counts(stories):  # noqa: F811
    with serving(stories) as url:
        plan = LoadPlan(Load(6, concurrency=3), prompt=40, output=10, rounds=1, ignore_eos=True)
        result = measure_servers(plan, [url], None, None, quietly)
    (server,) = report.as_dict(result)["servers"]
    assert (server["model"], server["api"], server["answers"]) == ("stories260K", "completions", 6)
    assert server["output_tokens"] == 60 and server["uncounted"] == server["counted_by_limit"] == 0
    assert server["prompt_tokens"]["mean"] == pytest.approx(40, abs=12)
    assert server["ttft_s"]["count"] == server["tpot_s"]["count"] == 6


def test_missing_figures_are_noted(capsys):
    def silent(path, body):
        reply = completions(path, body)
        if body:
            reply.parts = [part for part in reply.parts if b"usage" not in part] if body["stream"] else [b"{}"]
        return reply

    with ScriptedServer(silent) as server:
        assert main(["bench", "--against", server.url, "--requests", "2", "--output", "3", "--repeat", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 answers are counted as the 3 requested tokens" in said
    assert "prompt lengths are in words, not tokens" in said


def test_failures_are_counted_by_kind_and_do_not_end_a_run(capsys):
    asked = itertools.count()

    def failing(path, body):
        if body and body["stream"] and next(asked) % 2:
            return Reply([b'{"error": {"message": "queue full"}}'], 503, "application/json")
        return completions(path, body)

    with ScriptedServer(failing) as server:
        arguments = ["--requests", "6", "--repeat", "1", "--markdown", "--slo", "ttft=10s"]
        assert main(["bench", "--against", server.url, *arguments]) == 0
    said = capsys.readouterr().out
    assert "| answers | 3 of 6 |" in said and "(3 of 6)" in said
    assert "3 requests failed: HTTP 503: queue full" in said


@pytest.mark.slow
def test_ctrl_c_reports_the_measurements_so_far():
    stop, fourth = threading.Event(), threading.Event()
    asked = itertools.count(1)

    def stalling(path, body):
        if body and body["stream"] and next(asked) >= 4:
            fourth.set()
            stop.wait(30)
        return completions(path, body)

    command = [sys.executable, "-m", "localllm", "bench", "--requests", "9", "--json", "--against"]
    with (
        ScriptedServer(stalling) as server,
        subprocess.Popen(
            [*command, server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as process,
    ):
        assert fourth.wait(30)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=100)
        stop.set()
    assert (process.returncode, error) == (130, b"")
    found = json.loads(out)
    assert not found["complete"]
    assert (found["servers"][0]["answers"], found["servers"][0]["unanswered"]) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--against", "x"], "not a server's address"),
        (["demo", "--slo", "ttft=1s"], "--slo applies only to servers"),
        (["--against", "http://localhost:9", "--depth", "5"], "--depth applies only to models"),
        (
            ["--against", "http://localhost:9", "--rate", "5", "--concurrency", "2"],
            "--rate and --concurrency cannot be combined",
        ),
        (["--against", "http://localhost:9", "--api", "soap"], "--api is 'soap'"),
        (["--against", "http://localhost:9", "--prompt", "1,2"], "one whole number"),
        (["--against", "http://localhost:9", "--requests", "0"], "requests is 0"),
        (["--against", "http://localhost:9", "--shared-prefix", "500"], "longer than the prompt"),
        ([], "no model is named"),
    ],
)
def test_contradicting_flags_are_rejected_before_any_request(capsys, arguments, sentence):
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_load_needs_an_end():
    with pytest.raises(UsageError, match="no end"):
        Load()

"""Compares a simulation with a running server: sends it the load, simulates the requests as they arrived with the
tokens that the server counted, and reports the error of every figure.

The durations of steps must have been measured before; those of the check itself are not fitted to.
"""

import asyncio
import json
import math
import random
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.benchmark.load.client import SERVER_APIS, LoadClient, LoadRequest
from localllm.benchmark.load.drive import LoadRound
from localllm.benchmark.load.outcome import RequestOutcome
from localllm.benchmark.load.run import WORDS, LoadMeasures
from localllm.errors import NetworkError, UsageError
from localllm.files import write_atomic
from localllm.formatting import format_seconds, format_table, three_digits
from localllm.simulate.load import LoadPlan, Turn
from localllm.simulate.report import LABELS
from localllm.simulate.simulation import PERCENTILES, Simulated, simulate
from localllm.simulate.target import Target

CHECKED = ("ttft", "tpot", "itl", "e2e")
PROBE_WORDS = 200
TIMEOUT_S = 600.0
MAX_KEPT_CHECKS = 200
MOST_LATE_S = 0.01  # that a client may be late
MOST_SCALE = 2.0  # of counted tokens, beyond which few requests are no measure of it


@dataclass(frozen=True)
class CheckRow:
    """A figure as predicted and as measured; in seconds or per second."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True)
class Check:
    url: str
    model: str
    step_times: str
    requests: int
    failed: int
    late_s: float  # 99th percentile of how late the client sent a request
    rows: list[CheckRow]


def prompt_text(turn: Turn, tokens_per_word: float) -> str:
    """Return words for the spans of a prompt: equal spans have equal words."""
    words: list[str] = []
    for span, length in turn.prompt:
        count = max(1, round(length / tokens_per_word))
        words += random.Random(span).choices(WORDS, k=count)
    return " ".join(words)


async def send_load(
    client: LoadClient,
    load: LoadPlan,
    *,
    api: str,
    model: str,
    tokens_per_word: float,
    report: Callable[[str], None],
) -> tuple[LoadRound, list[tuple[Turn, RequestOutcome]]]:
    """Send the requests of a load at their times, and return the outcomes."""
    wire, source, clock = SERVER_APIS[api], load.start(), time.perf_counter
    load_round = LoadRound(clock())
    outcomes: list[tuple[Turn, RequestOutcome]] = []
    changed = asyncio.Event()

    async def send(turn: Turn) -> None:
        request = LoadRequest(prompt_text(turn, tokens_per_word), turn.answer_len, wire.uses_sse)
        outcome = await client.send(wire, model, request, load_round.start + turn.arrival)
        outcomes.append((turn, outcome))
        load_round.outcomes.append(outcome)
        report(f"{len(outcomes)} requests answered")
        source.answered(turn, clock() - load_round.start)
        changed.set()

    in_flight = 0
    async with asyncio.TaskGroup() as tasks:
        started: list[asyncio.Task[None]] = []
        while True:
            now = clock() - load_round.start
            if (next_at := source.next_at()) <= now:
                started.append(tasks.create_task(send(source.pop())))
                await asyncio.sleep(0)
                continue
            in_flight = sum(not task.done() for task in started)
            if next_at == math.inf and not in_flight:
                break
            changed.clear()
            try:
                async with asyncio.timeout(None if next_at == math.inf else next_at - now):
                    await changed.wait()
            except TimeoutError:
                pass
    return load_round, outcomes


def check_server(
    url: str,
    load: LoadPlan,
    target: Target,
    *,
    api: str | None = None,
    model: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Check, Simulated]:
    """Send a load to a server and simulate it. Raises NetworkError if it does not answer, UsageError for a load
    that cannot be sent."""
    if load.turns > 1:
        raise UsageError("--check cannot send conversations", "leave --turns out")
    return asyncio.run(run_check(url, load, target, api=api, model=model, report=report))


async def run_check(
    url: str,
    load: LoadPlan,
    target: Target,
    *,
    api: str | None,
    model: str | None,
    report: Callable[[str], None],
) -> tuple[Check, Simulated]:
    async with LoadClient(url, TIMEOUT_S) as client:
        api = api or await client.detect_api()
        wire = SERVER_APIS[api]
        model = model or await client.first_model(wire)
        probe = " ".join(random.Random(load.seed).choices(WORDS, k=PROBE_WORDS))
        counted = await client.count_prompt_tokens(wire, model, probe)
        if not counted:
            raise NetworkError(f"{client.url} does not report the tokens of a prompt", "check a server that does")
        load_round, outcomes = await send_load(
            client, load, api=api, model=model, tokens_per_word=counted / PROBE_WORDS, report=report
        )
    answered = [(turn, outcome) for turn, outcome in outcomes if outcome.ok and outcome.output_tokens]
    if not answered:
        reason = next((outcome.error for _, outcome in outcomes if outcome.error), "no tokens")
        raise NetworkError(f"{client.url} answered none of {len(outcomes)} requests: {reason}", "check its log")
    simulated = simulate(trace_of(load, answered, load_round.start), target.setup, target.cost)
    measures = LoadMeasures([load_round])
    rows = [
        CheckRow(f"{name}_p{percent}_s", value, getattr(measures.latency(f"{name}_s"), f"p{percent}"))
        for name in CHECKED
        for percent, value in zip(PERCENTILES, simulated.percentiles(name), strict=True)
    ]
    rows.append(CheckRow("requests_per_s", simulated.requests / simulated.duration_s, measures.requests_per_s))
    rows.append(
        CheckRow(
            "output_tokens_per_s", simulated.output_tokens / simulated.duration_s, measures.output_tokens_per_s
        )
    )
    late_s = measures.latency("late_s").p99
    failed = len(outcomes) - len(answered)
    return Check(client.url, model, target.cost.source, len(answered), failed, late_s, rows), simulated


def trace_of(load: LoadPlan, answered: list[tuple[Turn, RequestOutcome]], start: float) -> LoadPlan:
    """Return the requests as they arrived, with the tokens that the server counted, and the beginnings that their
    prompts share."""
    scale = counted_per_planned(answered)
    turns: list[Turn] = []
    for turn, outcome in sorted(answered, key=lambda pair: pair[1].sent_at):
        prompt = counted_spans(turn, outcome.prompt_tokens or turn.prompt_len, scale)
        output = outcome.output_tokens or turn.answer_len
        turns.append(Turn(outcome.sent_at - start, prompt, output, turn.answer_id))
    return LoadPlan(trace=tuple(turns), requests=len(turns), seed=load.seed)


def counted_per_planned(answered: list[tuple[Turn, RequestOutcome]]) -> float:
    """Return the ratio of prompt tokens counted by the server to planned ones, without a constant number per
    prompt."""
    lengths = [(turn.prompt_len, outcome.prompt_tokens) for turn, outcome in answered if outcome.prompt_tokens]
    if len({planned for planned, _ in lengths}) < 2:
        return 1.0  # as the words were chosen
    slope, _ = statistics.linear_regression(*zip(*lengths, strict=True))
    return slope if 1 / MOST_SCALE < slope < MOST_SCALE else 1.0


def counted_spans(turn: Turn, counted: int, scale: float) -> tuple[tuple[int, int], ...]:
    """Return the spans of a prompt with the tokens that the server counted: what it adds is in the last one."""
    spans, left = list[tuple[int, int]](), counted
    for span, length in turn.prompt[:-1]:
        own = min(round(scale * length), left - 1)
        spans.append((span, own))
        left -= own
    return (*spans, (turn.prompt[-1][0], left))


def format_check(check: Check) -> str:
    """Return the check as text, without a final line break."""
    rows = [("", "PREDICTED", "MEASURED", "ERROR")]
    for row in check.rows:
        label, show = row.name.replace("_per_s", "/s").replace("_", " "), three_digits
        if "_p" in row.name and row.name.endswith("_s") and "/s" not in label:
            name, percentile, _ = row.name.split("_")
            label, show = f"{LABELS[name]} {percentile}", format_seconds
        predicted, measured = (
            "-" if math.isnan(value) else show(value) for value in (row.predicted, row.measured)
        )
        rows.append((label, predicted, measured, f"{row.error:+.1%}"))
    failed = f", {check.failed} failed" if check.failed else ""
    head = [f"{check.url}, {check.model}: {check.requests} requests answered{failed}"]
    head += textwrap.wrap(f"step times: {check.step_times}", 80)
    blocks = ["\n".join(head), format_table(rows)]
    if check.late_s > MOST_LATE_S:
        late = format_seconds(check.late_s)
        blocks.append(f"the client sent 1% of the requests at least {late} late: it is overloaded itself")
    return "\n\n".join(blocks)


def as_dict(check: Check) -> dict[str, Any]:
    return {
        "url": check.url,
        "model": check.model,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "step_times": check.step_times,
        "requests": check.requests,
        "failed": check.failed,
        "late_p99_s": check.late_s,
        "figures": {
            row.name: {
                "predicted": finite(row.predicted),
                "measured": finite(row.measured),
                "error": finite(row.error),
            }
            for row in check.rows
        },
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def keep_check(home: Path, check: Check, note: Callable[[str], None]) -> None:
    """Append a check to `checks.jsonl`, dropping the oldest. note: receives the reason if that fails"""
    file = home / "checks.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        lines = [*lines, json.dumps(as_dict(check))][-MAX_KEPT_CHECKS:]
        write_atomic(file, "".join(line + "\n" for line in lines))
    except (OSError, UnicodeDecodeError) as error:
        note(f"note: the check could not be saved: {error}")

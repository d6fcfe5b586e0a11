"""Formats the result of a load: text and Markdown tables with servers side by side, the JSON object described in
docs/bench.md, and CSV with a row per server.
"""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from localllm.benchmark.load.run import LATENCIES, LoadMeasures, LoadPlan, LoadResult, LoadTarget
from localllm.benchmark.summary import MIN_PAIRS, Distribution, paired_ratio
from localllm.formatting import format_seconds, three_digits

TableRow = tuple[str, ...]
LATENCY_LABELS = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E"}


def table_rows(result: LoadResult) -> list[TableRow]:
    """Return the table, beginning with headers: a row per measure, a column per server."""
    measured_targets = [(target, result.measures(target)) for target in result.targets]
    measures: list[tuple[str, Callable[[LoadMeasures], str]]] = [
        ("answers", lambda m: f"{len(m.answered)} of {len(m.outcomes)}"),
        ("prompt tokens", lambda m: _number(m.prompt_tokens.mean)),
        ("output tokens", _output),
        *((f"{LATENCY_LABELS[name]} p50, p95, p99", _latency(name)) for name in LATENCY_LABELS),
        ("TPS", lambda m: _number(m.latency("tokens_per_s").p50)),
        ("requests/s", lambda m: _number(m.requests_per_s)),
        ("output tokens/s", lambda m: _number(m.output_tokens_per_s)),
    ]
    if result.plan.objective:
        measures.append(
            ("goodput, requests/s", lambda m: f"{_number(m.goodput)} ({m.met_objectives} of {len(m.outcomes)})")
        )
    measures.append(("most in flight", lambda m: str(m.max_in_flight)))
    headers = [
        ("", *(t.url for t, _ in measured_targets)),
        ("model", *(f"{t.model} ({t.api})" for t, _ in measured_targets)),
    ]
    return [*headers, *((label, *(cell(m) for _, m in measured_targets)) for label, cell in measures)]


def _output(measured: LoadMeasures) -> str:
    return "not reported" if measured.output_tokens is None else str(measured.output_tokens)


def _latency(name: str) -> Callable[[LoadMeasures], str]:
    def cell(measured: LoadMeasures) -> str:
        distribution = measured.latency(name)
        return ", ".join(map(format_seconds, (distribution.p50, distribution.p95, distribution.p99)))

    return cell


def _number(value: float) -> str:
    return "-" if math.isnan(value) else three_digits(value)


def result_facts(result: LoadResult) -> list[tuple[str, str]]:
    """Return the setup as names and values."""
    plan, machine, noise = result.plan, result.machine, result.noise
    facts = [
        ("date", result.date),
        ("processor", f"{machine.processor}, {machine.cores:g} cores, with the client"),
    ]
    facts += [("load", describe_load(plan)), ("prompts", describe_prompts(result))]
    facts += [("objectives", str(plan.objective))] if plan.objective else []
    if noise:
        facts.append(("others", f"used {noise.others:.0%} of the processors, including servers on this machine"))
    return facts


def describe_load(plan: LoadPlan) -> str:
    load = plan.load
    mode = f"{load.concurrency} at once" if load.rate is None else f"{load.rate:g} requests/s, Poisson"
    limits = [f"{load.requests} requests"] if load.requests is not None else []
    limits += [f"{load.duration_s:g} s"] if load.duration_s is not None else []
    rounds = "1 round" if plan.rounds == 1 else f"{plan.rounds} rounds in turn"
    return f"{mode}, {' or '.join(limits)} per round, {rounds}, seed {plan.seed}"


def describe_prompts(result: LoadResult) -> str:
    plan = result.plan
    kind = "pieces of a text" if plan.text else "random words"
    shared = f", {plan.shared_prefix} of them shared by all" if plan.shared_prefix else ""
    unit = "tokens" if result.tokens_per_word else "words"
    return f"about {plan.prompt} {unit} of {kind}{shared}; at most {plan.output} tokens of answer, greedy"


def result_notes(result: LoadResult) -> list[str]:
    """Return the notes that a reader needs to interpret the table."""
    notes = [] if result.complete else ["interrupted: results up to that point"]
    if not result.tokens_per_word:
        notes.append("no server reported prompt tokens: prompt lengths are in words, not tokens")
    for target in result.targets:
        notes += [f"{target.url}: {note}" for note in _notes(result.measures(target), result.plan)]
    return [*notes, *compare_throughput(result)]


def _notes(measured: LoadMeasures, plan: LoadPlan) -> list[str]:
    notes = [f"{count} requests failed: {error}" for error, count in measured.errors.most_common()]
    if measured.unanswered:
        notes.append(f"{measured.unanswered} requests were unanswered when it was interrupted")
    if measured.uncounted_answers:
        notes.append(f"it did not report the tokens of {measured.uncounted_answers} answers: they have no TPOT")
    if measured.counted_by_limit:
        notes.append(
            f"it reports no usage in its streams: {measured.counted_by_limit} answers are counted as the "
            f"{plan.output} requested tokens, as it reported this limit as their end"
        )
    if measured.output_tokens and abs(measured.pieces / measured.output_tokens - 1) > 0.1:
        notes.append(f"{measured.output_tokens} tokens came in {measured.pieces} pieces: ITL is between pieces")
    if plan.load.rate is not None and measured.queue_grows:
        notes.append(
            "its queue grew until the last arrival: it cannot keep up, so latencies grow with the duration"
        )
    late = measured.latency("late_s").p99
    if late > 0.1 * measured.latency("ttft_s").p50:
        notes.append(
            f"the client sent 1% of requests at least {format_seconds(late)} late: it is overloaded itself"
        )
    return notes


def compare_throughput(result: LoadResult) -> list[str]:
    """Compare two servers' output tokens per second by round; empty for too few rounds."""
    if len(result.targets) != 2 or result.plan.rounds < MIN_PAIRS or not result.complete:
        return []
    rates = [[LoadMeasures([round]).output_tokens_per_s for round in target.rounds] for target in result.targets]
    if not all(rate > 0 for rate in (*rates[0], *rates[1])):  # not measured, or there was no output
        return []
    first_url, second_url = (target.url for target in result.targets)
    return [f"output tokens/s: {paired_ratio(rates[0], rates[1]).verdict(first_url, second_url)}"]


def as_markdown(result: LoadResult) -> str:
    header, *rows = table_rows(result)
    table = [header, ("---",) * len(header), *rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    notes = [*(f"{name}: {value}" for name, value in result_facts(result)), *result_notes(result)]
    return "\n".join([*lines, "", *(f"- {line}" for line in notes)]) + "\n"


def as_dict(result: LoadResult) -> dict[str, Any]:
    """Return the JSON object, with None instead of NaN; times are in seconds."""
    plan = result.plan
    return {
        "benchmark": "localllm bench --against",
        "date": result.date,
        "machine": asdict(result.machine),
        "noise": result.noise and asdict(result.noise),
        "complete": result.complete,
        "load": asdict(plan.load) | {"rounds": plan.rounds, "seed": plan.seed},
        "prompt": plan.prompt,
        "prompt_unit": "tokens" if result.tokens_per_word else "words",
        "shared_prefix": plan.shared_prefix,
        "output": plan.output,
        "ignore_eos": plan.ignore_eos,
        "objectives_s": plan.objective and plan.objective.limits,
        "notes": result_notes(result),
        "servers": [_server(target, result.measures(target)) for target in result.targets],
    }


def _server(target: LoadTarget, measured: LoadMeasures) -> dict[str, Any]:
    return {
        **_counts(target, measured),
        "errors": dict(measured.errors),
        "prompt_tokens": measured.prompt_tokens.as_dict(),
        **{name: measured.latency(name).as_dict() for name in LATENCIES},
        "rounds": [
            {
                "wall_s": round.wall_s,
                "in_flight": round.in_flight,
                "requests": [
                    {
                        "arrival_s": outcome.arrival - round.start,
                        "sent_s": outcome.sent_at - round.start,
                        "pieces_s": [at - round.start for at in outcome.piece_times],
                        "ended_s": _finite(outcome.ended_at - round.start),
                        "prompt_tokens": outcome.prompt_tokens,
                        "output_tokens": outcome.output_tokens,
                        "counted_by": outcome.counted_by,
                        "error": outcome.error,
                    }
                    for outcome in round.outcomes
                ],
            }
            for round in target.rounds
        ],
    }


def _counts(target: LoadTarget, measured: LoadMeasures) -> dict[str, Any]:
    return {
        "url": target.url,
        "api": target.api,
        "model": target.model,
        "requests": len(measured.outcomes),
        "answers": len(measured.answered),
        "failed": sum(measured.errors.values()),
        "unanswered": measured.unanswered,
        "wall_s": measured.wall_s,
        "output_tokens": measured.output_tokens,
        "counted_by_limit": measured.counted_by_limit,
        "uncounted": measured.uncounted_answers,
        "pieces": measured.pieces,
        "requests_per_s": _finite(measured.requests_per_s),
        "output_tokens_per_s": _finite(measured.output_tokens_per_s),
        "met": measured.met_objectives,
        "goodput_requests_per_s": _finite(measured.goodput),
        "most_in_flight": measured.max_in_flight,
        "queue_grows": measured.queue_grows,
    }


def as_csv(result: LoadResult) -> str:
    """Return CSV with a header; cells without a measurement are empty."""
    table = []
    for target in result.targets:
        measured = result.measures(target)
        row = _counts(target, measured) | {"prompt_tokens_mean": _finite(measured.prompt_tokens.mean)}
        for name in LATENCIES:
            row |= _percentiles(name, measured.latency(name))
        table.append(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def _percentiles(name: str, distribution: Distribution) -> dict[str, float | None]:
    stem, unit = name.rsplit("_", 1) if name.endswith("_s") and not name.endswith("per_s") else (name, "")
    ends = f"_{unit}" if unit else ""
    return {f"{stem}_p{p}{ends}": _finite(getattr(distribution, f"p{p}")) for p in (50, 95, 99)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Formats a result: the JSON object described in docs/bench.md, CSV with a row per scenario, and Markdown."""

import csv
import io
import math
from dataclasses import asdict
from typing import Any

from localllm.benchmark.measure import Round
from localllm.benchmark.result import BenchmarkResult, ModelResult, PairedComparison, ScenarioResult
from localllm.benchmark.roofline import Roofline
from localllm.benchmark.summary import Distribution
from localllm.formatting import format_bytes, format_seconds, three_digits

CsvRow = dict[str, str | int | float | None]


def as_dict(result: BenchmarkResult) -> dict[str, Any]:
    """Return the JSON object, with None instead of NaN."""
    return {
        "benchmark": "localllm bench",
        "date": result.date,
        "machine": asdict(result.machine),
        "noise": {**asdict(result.noise), "warning": result.noise.warning},
        "warnings": result.warnings,
        "rounds": result.rounds,
        "seed": result.seed,
        "prompts": result.prompts,
        "drafts": result.drafts,
        "editions": [_edition(model) for model in result.models],
        "compared": [{**asdict(one.scenario), **_compared(one, result)} for one in result.comparisons],
    }


def _edition(edition: ModelResult) -> dict[str, Any]:
    return {
        **asdict(edition.loaded),
        "peak_bytes": edition.peak_bytes,
        "ceilings": asdict(edition.ceilings),
        "drift": edition.drift,
        "scenarios": [_scenario_json(measured) for measured in edition.scenarios],
        "left_out": [{**asdict(scenario), "reason": reason} for scenario, reason in edition.left_out],
    }


def _scenario_json(measured: ScenarioResult) -> dict[str, Any]:
    summary = {
        name: value.as_dict() if isinstance(value, Distribution) else value
        for name, value in vars(measured.requests).items()
    }
    return {
        **asdict(measured.scenario),
        "prefill_tokens_per_s": measured.prefill_tokens_per_s.as_dict(),
        "decode_tokens_per_s": measured.decode_tokens_per_s.as_dict(),
        "requests": summary,
        "prefill": _roofline(measured.prefill),
        "decode": measured.decode and _roofline(measured.decode),
        "rounds": [_round(answers) for answers in measured.rounds],
    }


def _roofline(roof: Roofline) -> dict[str, Any]:
    names = ("bytes_per_s", "flops_per_s", "of_memory", "of_compute", "of_roof", "host_share", "bound")
    return {**asdict(roof), **{name: getattr(roof, name) for name in names}}


def _round(answers: Round) -> list[dict[str, Any]]:
    """Arrivals are relative to the first."""
    first = min(answer.arrival for answer in answers)
    return [
        {
            "arrival_s": answer.arrival - first,
            **answer.metrics.as_dict(),
            "begins_step": list(answer.begins_step),
        }
        for answer in answers
    ]


def _compared(one: PairedComparison, result: BenchmarkResult) -> dict[str, Any]:
    a, b = (edition.loaded.name for edition in result.models)
    return {
        "measure": one.measure,
        **asdict(one.ratio),
        "shown": one.ratio.shown,
        "verdict": one.ratio.verdict(a, b),
    }


def as_csv(result: BenchmarkResult) -> str:
    """Return CSV with a header; cells without a measurement are empty."""
    rows = [csv_row(model, scenario_result) for model in result.models for scenario_result in model.scenarios]
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in r.items()} for r in rows
    )
    return out.getvalue()


def csv_row(edition: ModelResult, measured: ScenarioResult) -> CsvRow:
    """One scenario of one model. Rates and times are medians unless the name states otherwise."""
    loaded, requests, decode = edition.loaded, measured.requests, measured.decode
    return {
        "edition": loaded.name,
        "device": loaded.device_name,
        "dtype": loaded.dtype,
        "kv_dtype": loaded.kv_dtype,
        "threads": loaded.threads,
        "load_s": loaded.load_s,
        "weight_bytes": loaded.weight_bytes,
        "peak_bytes": edition.peak_bytes,
        **vars(measured.scenario),
        "rounds": len(measured.rounds),
        "prompt_tokens": requests.prompt_tokens,
        "cached_tokens": requests.cached_tokens,
        "output_tokens": requests.output_tokens,
        "draft_tokens": requests.draft_tokens,
        "accepted_tokens": requests.accepted_tokens,
        "prefill_tokens_per_s": measured.prefill_tokens_per_s.p50,
        "prefill_spread": measured.prefill_tokens_per_s.spread,
        "decode_tokens_per_s": measured.decode_tokens_per_s.p50,
        "decode_spread": measured.decode_tokens_per_s.spread,
        "stream_tokens_per_s": requests.tokens_per_s.p50,
        "ttft_p50_s": requests.ttft_s.p50,
        "ttft_p95_s": requests.ttft_s.p95,
        "ttft_p99_s": requests.ttft_s.p99,
        "itl_p50_s": requests.itl_s.p50,
        "itl_p95_s": requests.itl_s.p95,
        "itl_p99_s": requests.itl_s.p99,
        "tpot_s": requests.tpot_s.p50,
        "e2e_s": requests.e2e_s.p50,
        "prefill_flops_per_s": measured.prefill.flops_per_s,
        "prefill_of_roof": measured.prefill.of_roof,
        "prefill_bound": measured.prefill.bound,
        "decode_bytes_per_s": decode and decode.bytes_per_s,
        "decode_of_roof": decode and decode.of_roof,
        "decode_bound": decode and decode.bound,
    }


TABLE_HEADER = (
    "model",
    "tokens",
    "prefill/s",
    "TTFT",
    "decode/s",
    "ITL p50, p95, p99",
    "memory",
    "of roof",
    "bound by",
)


def as_markdown(result: BenchmarkResult) -> str:
    """Return a table, the setup, and warnings."""
    machine = result.machine
    rows = [_cells(edition, measured) for edition in result.models for measured in edition.scenarios]
    table = [TABLE_HEADER, ("---",) * len(TABLE_HEADER), *rows]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    commit = f", commit {machine.commit}" if machine.commit else ""
    devices = dict.fromkeys(
        f"{one.loaded.device_name} in {one.loaded.dtype}"
        + ("" if one.loaded.threads is None else f", threads: {one.loaded.threads}")
        for one in result.models
    )
    notes = [
        f"{'; '.join(devices)}; {versions}{commit}; {result.date}",
        f"medians of {result.rounds} rounds, ± half the way from lowest to highest; {result.prompts}, "
        f"{'with' if result.drafts else 'without'} drafts; the roof is a copy of "
        + " and ".join(f"{format_bytes(one.ceilings.copy)}/s" for one in result.models),
        *(f"{one.scenario}, {one.measure}: {_compared(one, result)['verdict']}" for one in result.comparisons),
        *(f"not run: {one.loaded.name}, {s}: {reason}" for one in result.models for s, reason in one.left_out),
        *(f"**{warning}**" for warning in result.warnings),
    ]
    lines = ["| " + " | ".join(_escaped(cell) for cell in cells) + " |" for cells in table]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def _cells(edition: ModelResult, measured: ScenarioResult) -> tuple[str, ...]:
    requests, decode = measured.requests, measured.decode
    gaps = ", ".join(map(format_seconds, (requests.itl_s.p50, requests.itl_s.p95, requests.itl_s.p99)))
    return (
        edition.loaded.name,
        str(measured.scenario),
        with_spread(measured.prefill_tokens_per_s),
        format_seconds(requests.ttft_s.p50),
        with_spread(measured.decode_tokens_per_s),
        gaps,
        f"{format_bytes(decode.bytes_per_s)}/s" if decode else "-",
        f"{decode.of_roof:.0%}" if decode else "-",
        decode.bound if decode else "-",
    )


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def with_spread(measured: Distribution) -> str:
    """Return, for example, `12.3 ±4%`."""
    if math.isnan(measured.p50):
        return "-"
    return three_digits(measured.p50) + (f" ±{measured.spread:.0%}" if measured.count > 1 else "")

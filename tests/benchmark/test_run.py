"""Benchmarks of real models: every reported number follows from raw gaps and from the bytes that steps read.
Absolute values are not tested, as machines differ."""

import csv
import io
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from localllm.arch.cost import SequenceStep, bytes_read, flops
from localllm.benchmark.figures import decode_phase
from localllm.benchmark.report import as_csv, as_dict, as_markdown
from localllm.benchmark.result import BenchmarkResult
from localllm.benchmark.run import (
    BenchmarkedModel,
    BenchmarkPlan,
    compare_models,
    load_subject,
    make_prompt_source,
    run_benchmark,
)
from localllm.benchmark.scenario import PromptSource, Scenario, ScenarioGrid
from localllm.cli.bench_page import format_benchmark
from localllm.comparison import subject as subjects
from localllm.comparison.subject import Subject
from localllm.errors import DoesNotFit, UsageError
from localllm.llm.llm import LLM
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.plan.weights import weight_bytes
from localllm.runtime.sequence import Sequence
from localllm.settings import Settings

OUTPUT, ROUNDS = 6, 2
ASKED = ScenarioGrid((20, 40), (0, 37), (1, 3), (OUTPUT,))
Write = Callable[..., Path]


def of(folder: Path | str, settings: Settings, quant: str | None = None) -> Subject:
    return load_subject(str(folder), settings, device=None, options=LoadOptions(quant=quant))


@pytest.fixture(scope="module", params=["Llama 3.x", "Qwen3-MoE", "Qwen3-Next"])
def measured(request: pytest.FixtureRequest, tiny: Write, settings: Settings) -> tuple[Subject, BenchmarkResult]:
    edition = of(tiny(request.param), settings)
    return edition, run_benchmark([edition], BenchmarkPlan(ASKED, ROUNDS))


def test_every_number_follows_from_the_gaps_of_the_report(measured: tuple[Subject, BenchmarkResult]) -> None:
    subject, result = measured
    report = json.loads(json.dumps(as_dict(result), allow_nan=False))
    [edition] = report["editions"]
    scenarios = edition["scenarios"]
    assert [tuple(s[k] for k in ("prompt", "depth", "batch", "output")) for s in scenarios] == [
        (prompt, depth, batch, OUTPUT) for prompt in (20, 40) for depth in (0, 37) for batch in (1, 3)
    ]
    weights = weight_bytes(subject.header, subject.config, "float32", "cpu")
    for s in scenarios:
        streams = [stream for answers in s["rounds"] for stream in answers]
        assert len(s["rounds"]) == ROUNDS
        assert len(streams) == ROUNDS * s["batch"]
        for stream in streams:
            # Nothing of a new prompt was in the cache, and of what stands before it all whole blocks.
            assert stream["prompt_tokens"] == s["depth"] + s["prompt"]
            assert stream["cached_tokens"] == s["depth"] // 16 * 16
            assert stream["output_tokens"] == OUTPUT == len(stream["itl_s"]) + 1
            assert all(stream["begins_step"])
        gaps = [gap for stream in streams for gap in stream["itl_s"]]
        itl = s["requests"]["itl_s"]
        assert [itl["p50"], itl["p95"], itl["p99"]] == pytest.approx(list(numpy.percentile(gaps, [50, 95, 99])))
        assert s["requests"]["ttft_s"]["p50"] == pytest.approx(statistics.median(x["ttft_s"] for x in streams))
        tpot = [(x["e2e_s"] - x["ttft_s"]) / (OUTPUT - 1) for x in streams]
        assert s["requests"]["tpot_s"]["mean"] == pytest.approx(statistics.fmean(tpot))
        computed = s["batch"] * (s["prompt"] + s["depth"] % 16)
        prefills = sorted(prefill_s(answers) for answers in s["rounds"])
        rates = sorted(computed / seconds for seconds in prefills)
        assert s["prefill_tokens_per_s"]["low"] == pytest.approx(rates[0])
        assert s["prefill"]["seconds"] == pytest.approx(prefills[0])
        share = SequenceStep(s["prompt"] + s["depth"] % 16, s["prompt"] + s["depth"], sequences=s["batch"])
        assert s["prefill"]["flops"] == flops(subject.config, (share,))
        if s["batch"] == 1:
            steps = sorted(sum(answers[0]["itl_s"]) / (OUTPUT - 1) for answers in s["rounds"])
            assert s["decode_tokens_per_s"]["high"] == pytest.approx(1 / steps[0])
            one = [(SequenceStep(1, s["depth"] + s["prompt"] + i),) for i in range(1, OUTPUT)]
            mean = statistics.fmean(bytes_read(subject.config, weights, step, 4, (4, 0)) for step in one)
            assert s["decode"]["bytes"] == pytest.approx(mean, rel=1e-6)
            assert s["decode"]["bytes_per_s"] == pytest.approx(mean / steps[0])
            assert s["decode"]["of_memory"] == pytest.approx(mean / steps[0] / edition["ceilings"]["copy"])


def prefill_s(answers: list[dict[str, Any]]) -> float:
    """Seconds of a round from the first scheduling to the last first token."""
    begin = min(a["arrival_s"] + a["queue_s"] for a in answers)
    return max(a["arrival_s"] + a["ttft_s"] for a in answers) - begin


def whole_s(answers: list[dict[str, Any]]) -> float:
    """Seconds of a round from the first arrival to the last token."""
    return max(a["arrival_s"] + a["e2e_s"] for a in answers)


def test_bounds_follow_the_rule(measured: tuple[Subject, BenchmarkResult]) -> None:
    _, result = measured
    roofs = [roof for found in result.models[0].scenarios for roof in (found.prefill, found.decode) if roof]
    for roof in roofs:
        rest = 1 - roof.products_s / roof.seconds
        half = min(roof.products_s, roof.seconds) / 2
        expected = "host" if rest > 0.5 else "memory" if roof.reading_s >= half else "compute"
        assert roof.bound == expected
        assert roof.of_roof == max(roof.reading_s, roof.computing_s) / roof.seconds


def test_csv_and_markdown_have_a_row_a_scenario(measured: tuple[Subject, BenchmarkResult]) -> None:
    _, result = measured
    rows = list(csv.DictReader(io.StringIO(as_csv(result))))
    found = as_dict(result)["editions"][0]["scenarios"]
    assert len(rows) == len(found) == 8
    for row, scenario in zip(rows, found, strict=True):
        assert [int(row[name]) for name in ("prompt", "depth", "batch")] == [
            scenario[name] for name in ("prompt", "depth", "batch")
        ]
        assert float(row["itl_p95_s"]) == scenario["requests"]["itl_s"]["p95"]
        assert row["prefill_bound"] == scenario["prefill"]["bound"]
    lines = as_markdown(result).splitlines()
    table = lines[: lines.index("")]
    assert len(table) == 2 + 8
    assert len({line.count("|") for line in table}) == 1
    assert all(line.startswith("- ") for line in lines[len(table) + 1 :])


def test_the_page_states_the_run_and_the_actual_counts(measured: tuple[Subject, BenchmarkResult]) -> None:
    subject, result = measured
    text = format_benchmark(result)
    assert f"model       {subject.name}" in text
    assert "2 rounds after a warm-up round, greedy, without drafts, prompts of random tokens" in text
    [row] = [line.split() for line in text.splitlines() if line.startswith("3 x 40+6 at 37  ")][:1]
    assert row[-3:] == ["45", "32", "6"]


class KnownAnswerDrafter:
    """One draft token per step, from a known answer to the same prompt, otherwise any token."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, ...], list[int]] = {}

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            prompt = sequence.prompt_len
            said = self.said.get(tuple(sequence.token_ids[:prompt]), [5] * 99)
            sequence.draft_ids = said[len(sequence.token_ids) - prompt :][:1]

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self.said[tuple(sequence.request.prompt_ids)] = sequence.token_ids[sequence.prompt_len :]


class Repeating(PromptSource):
    """Always returns the same prompt."""

    def make_prompt(self, length: int) -> list[int]:
        return list(range(100, 100 + length))


def test_bytes_are_counted_by_step_and_not_by_token(tiny: Write, settings: Settings) -> None:
    edition, scenario = of(tiny("Llama 3.x"), settings), Scenario(20, 0, 1, 13)
    with edition.load(64) as llm:
        llm.worker.engine.drafter = KnownAnswerDrafter()
        contestant = BenchmarkedModel(edition, llm, Repeating(3072, (), 0), [scenario])
        for _ in range(3):
            contestant.run_round(scenario)
        contestant.measure_ceilings()
        found = contestant.scenario_result(scenario, contestant.ceilings[0])
    # What was said once is known the next time: 12 tokens of 6 steps behind the one of the prefill.
    assert [[answer.steps for answer in answers] for answers in found.rounds[1:]] == [[7], [7]]
    assert found.rounds[1][0].metrics.accepted_tokens == 6
    decodings = sorted(filter(None, map(decode_phase, found.rounds)), key=lambda one: one.step_s)
    told = sorted((one.steps, one.tokens, one.shares[0].tokens) for one in decodings)
    assert told == [(6, 12, 2), (6, 12, 2), (12, 12, 2)]
    middle = decodings[1]  # a busy machine may have made any of them that
    weights = contestant.llm.memory.weights
    assert found.decode and found.decode.seconds == middle.step_s
    assert found.decode.bytes == bytes_read(edition.config, weights, middle.shares, 4, (4, 0))
    assert 2 in contestant.ceilings[0].products  # a step has two rows


@pytest.mark.parametrize("drafts", [False, True])
def test_drafts_are_made_only_on_request(tiny: Write, settings: Settings, drafts: bool) -> None:
    edition = of(tiny("Llama 3.x"), settings)

    def load(context: int) -> LLM:
        llm = edition.load(context)
        llm.worker.engine.drafter = KnownAnswerDrafter()
        return llm

    result = run_benchmark(
        [replace(edition, load=load)], BenchmarkPlan(ScenarioGrid((20,), outputs=(13,)), 2, drafts=drafts)
    )
    drafted = result.models[0].scenarios[0].requests.draft_tokens
    assert (drafted > 0) == drafts == as_dict(result)["drafts"]
    assert ("with drafts" if drafts else "without drafts") in format_benchmark(result)


def test_drafts_of_a_model_that_has_none_are_refused(tiny: Write, settings: Settings) -> None:
    with pytest.raises(UsageError, match="has no drafts"):
        run_benchmark(
            [of(tiny("Llama 3.x"), replace(settings, draft="off"))],
            BenchmarkPlan(ScenarioGrid((5,), outputs=(2,)), 1, drafts=True),
        )


# --- two beside each other ---


def test_two_are_compared_by_pairs_of_their_rounds(tiny: Write, settings: Settings) -> None:
    a, b = of(tiny("Llama 3.x"), settings), of(tiny("Qwen3-MoE"), settings)
    result = compare_models(a, b, BenchmarkPlan(ScenarioGrid((20,), (0, 37), (2,), (48,)), 4))
    report = as_dict(result)
    assert [(c["depth"], c["measure"]) for c in report["compared"]] == [
        (depth, measure) for depth in (0, 37) for measure in ("decoding", "prefill", "whole answers")
    ]
    for place, depth in enumerate((0, 37)):
        both = [edition["scenarios"][place] for edition in report["editions"]]
        times = [
            [max(a["arrival_s"] + a["e2e_s"] for a in answers) for answers in scenario["rounds"]]
            for scenario in both
        ]
        logs = [math.log(slow / fast) for fast, slow in zip(*times, strict=True)]
        whole = report["compared"][3 * place + 2]
        assert (whole["depth"], whole["pairs"]) == (depth, 4)
        assert math.log(whole["ratio"]) == pytest.approx(statistics.fmean(logs))
        reach = 3.182446 * statistics.stdev(logs) / 2
        assert math.log(whole["high"] / whole["low"]) == pytest.approx(2 * reach, rel=1e-4)
        assert whole["verdict"] in format_benchmark(result)
        assert whole["verdict"] in as_markdown(result)
    assert report["editions"][0]["peak_bytes"] is None  # of a process that holds both


def test_models_of_one_vocabulary_get_the_same_prompts(tiny: Write, settings: Settings) -> None:
    a, b = (of(tiny("Llama 3.x"), settings) for _ in range(2))
    prompts = [make_prompt_source(one, BenchmarkPlan(ASKED, 1, seed=3)) for one in (a, b)]
    assert prompts[0].make_prompt(50) == prompts[1].make_prompt(50) != prompts[0].make_prompt(50)
    special = a.tokenizer.special_ids
    assert special
    assert not set(prompts[0].make_prompt(20_000)) & set(special)


def test_prompts_cut_from_a_text_are_its_tokens_behind_three_others(tiny: Write, settings: Settings) -> None:
    edition = of(tiny("Llama 3.x"), settings)
    text = "Lily had a red ball and a blue one. " * 5
    ids = edition.tokenizer.encode(text)
    prompts = make_prompt_source(edition, BenchmarkPlan(ASKED, 1, text=text))
    first, second = prompts.make_prompt(30), prompts.make_prompt(30)
    assert first[:3] != second[:3]
    assert any(first[3:] == (ids * 2)[at : at + 27] for at in range(len(ids)))


def test_two_models_that_do_not_fit_together_are_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    edition = of("demo", settings)
    fit = check_fit(edition.header, FreeMemory("cpu", 2**40), LoadOptions(64, dtype="float32"), name="")
    enough = fit.weights.total + fit.workspace + 3_000_000  # for one
    monkeypatch.setattr(subjects, "free_bytes", lambda place: enough)
    with pytest.raises(DoesNotFit, match="demo and demo do not fit into memory together"):
        compare_models(edition, edition, BenchmarkPlan(ScenarioGrid((20,), outputs=(4,)), 3))


def test_two_rounds_are_too_few_to_compare(tiny: Write, settings: Settings) -> None:
    edition = of(tiny("Llama 3.x"), settings)
    with pytest.raises(UsageError, match="2 rounds are too few"):
        compare_models(edition, edition, BenchmarkPlan(ASKED, 2))


def test_a_model_that_cannot_run_is_reported_with_the_reason(tiny: Write, settings: Settings) -> None:
    edition = of(tiny("Llama 3.x"), settings)
    result = run_benchmark([edition], BenchmarkPlan(ScenarioGrid((20, 5000), outputs=(2,)), 1))
    [measured] = result.models
    assert [found.scenario.prompt for found in measured.scenarios] == [20]
    assert "not run: 5000+2   5002 tokens per stream, but the model supports 256" in format_benchmark(result)
    assert as_dict(result)["editions"][0]["left_out"][0]["prompt"] == 5000
    with pytest.raises(UsageError, match="can run none of the scenarios"):
        run_benchmark([edition], BenchmarkPlan(ScenarioGrid((5000,)), 1))


def test_a_quantized_edition_is_measured_as_such(tiny: Write, settings: Settings) -> None:
    folder = tiny("Llama 3.x")
    asked = BenchmarkPlan(ScenarioGrid((20,), outputs=(3,)), 1)
    plain, int8 = run_benchmark([of(folder, settings), of(folder, settings, "int8")], asked).models
    assert int8.loaded.name == f"{plain.loaded.name} in INT8"
    assert int8.loaded.formats["INT8"] > 0
    assert int8.scenarios[0].decode and plain.scenarios[0].decode
    assert int8.scenarios[0].decode.bytes < 0.6 * plain.scenarios[0].decode.bytes

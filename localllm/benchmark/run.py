"""Runs a benchmark: load, warm up, measure ceilings, run all scenarios in turn, measure ceilings again.

Every scenario left out is reported with its reason.
"""

import datetime
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from localllm.benchmark.contestant import BenchmarkedModel
from localllm.benchmark.machine import NoiseMeter, describe_machine
from localllm.benchmark.prompts import PromptSource
from localllm.benchmark.result import BenchmarkResult, ModelResult, PairedComparison
from localllm.benchmark.scenario import Scenario, ScenarioGrid, required_context, unrunnable_reason
from localllm.checkpoint.header import read_header
from localllm.comparison.subject import Subject, find_subject
from localllm.errors import DoesNotFit, UsageError
from localllm.hardware.device import reset_peak_bytes, resolve_device
from localllm.hub.resolve import resolve_model
from localllm.llm.llm import LLM
from localllm.quantize.keep import find_or_quantize
from localllm.settings import Settings

SMALLER_SCENARIO_REMEDY = "ask for shorter prompts and answers, less depth or fewer streams"
RANDOM_PROMPTS = "random tokens"

ReportProgress = Callable[[str], None]  # receives the current activity


@dataclass(frozen=True)
class BenchmarkPlan:
    """The measurement to run for every model."""

    grid: ScenarioGrid
    rounds: int
    seed: int = 0
    text: str | None = None  # source of prompts; None for random tokens
    text_name: str = RANDOM_PROMPTS
    drafts: bool = False


def load_subject(
    model: str,
    quant: str | None,
    settings: Settings,
    *,
    device: str | None,
    dtype: str | None,
    kv_dtype: str | None,
) -> Subject:
    """Return a model as stored, or the `--quant` version of it, which is made now if missing."""
    if quant is None:
        return find_subject(model, settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    ref = resolve_model(model)
    path = find_or_quantize(read_header(ref.path), quant, settings.home)
    subject = find_subject(str(path), settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    return replace(subject, name=f"{ref.name} in {quant.upper()}")


def run_benchmark(
    editions: Sequence[Subject], plan: BenchmarkPlan, report_progress: ReportProgress = lambda text: None
) -> BenchmarkResult:
    """Measure one model after another. Raises UsageError if one can run no scenario, and what `load` raises."""
    noise_meter = NoiseMeter()
    return make_result(plan, noise_meter, [measure_model(model, plan, report_progress) for model in editions])


def make_result(
    plan: BenchmarkPlan,
    noise_meter: NoiseMeter,
    editions: Sequence[ModelResult],
    compared: Sequence[PairedComparison] = (),
) -> BenchmarkResult:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return BenchmarkResult(
        date,
        describe_machine(),
        noise_meter.stop(),
        plan.rounds,
        plan.seed,
        plan.text_name,
        plan.drafts,
        tuple(editions),
        tuple(compared),
    )


def measure_model(edition: Subject, plan: BenchmarkPlan, report_progress: ReportProgress) -> ModelResult:
    possible, left_out = runnable_scenarios(edition, plan.grid)
    alone = reset_peak_bytes(resolve_device(edition.device))
    report_progress(f"loading {edition.name}")
    with closing(load_model(edition, required_context(possible, edition.config.max_context))) as llm:
        fitting, not_fitting = fitting_scenarios(llm, possible)
        contestant = prepare_model(edition, llm, plan, fitting, report_progress)
        for number in range(plan.rounds):
            for scenario in fitting:
                report_progress(f"{edition.name}: {scenario}, round {number + 1} of {plan.rounds}")
                contestant.run_round(scenario)
        report_progress("measuring this machine")
        contestant.measure_ceilings()
        return contestant.model_result([*left_out, *not_fitting], alone=alone)


def prepare_model(
    edition: Subject, llm: LLM, plan: BenchmarkPlan, scenarios: Sequence[Scenario], report_progress: ReportProgress
) -> BenchmarkedModel:
    """Return the model warmed up, with its first ceilings measured."""
    set_drafting(llm, plan.drafts)
    contestant = BenchmarkedModel(edition, llm, make_prompt_source(edition, plan), scenarios)
    report_progress(f"warming up {edition.name}")
    contestant.warm_up()
    report_progress("measuring this machine")
    contestant.measure_ceilings()
    return contestant


def set_drafting(llm: LLM, wanted: bool) -> None:
    """Enable or disable the drafts of a loaded model. Raises UsageError if it has none."""
    engine = llm.worker.engine
    if wanted and engine.drafter is None:
        raise UsageError(f"{llm.name} has no drafts", "leave out --draft, or set LOCALLLM_DRAFT to lookup")
    if not wanted:

        def disable() -> None:
            engine.drafter = None

        llm.worker.call(disable)


def load_model(edition: Subject, context: int) -> LLM:
    """Raises DoesNotFit with a remedy that applies here, where --context is not an option."""
    try:
        return edition.load(context)
    except DoesNotFit as error:
        remedy = SMALLER_SCENARIO_REMEDY if error.remedy and "--context" in error.remedy else error.remedy
        raise DoesNotFit(error.message, remedy) from None


def make_prompt_source(edition: Subject, plan: BenchmarkPlan) -> PromptSource:
    tokenizer = edition.tokenizer
    text = None if plan.text is None else tokenizer.encode(plan.text)
    vocab = min(edition.config.vocab_size, tokenizer.vocab_size)
    return PromptSource(vocab, tokenizer.special_ids, plan.seed, text)


ScenarioReasons = list[tuple[Scenario, str]]


def runnable_scenarios(edition: Subject, grid: ScenarioGrid) -> tuple[list[Scenario], ScenarioReasons]:
    """Return the scenarios that the model and the engine support, and the reasons against the others. Raises
    UsageError if none is left.
    """
    max_context = edition.config.max_context
    scenarios = grid.scenarios(max_context)
    return split_by_reason(edition.name, scenarios, lambda scenario: unrunnable_reason(scenario, max_context))


def fitting_scenarios(llm: LLM, scenarios: Sequence[Scenario]) -> tuple[list[Scenario], ScenarioReasons]:
    """Return the scenarios whose streams all fit into the cache at once."""
    blocks = llm.memory.blocks

    def reason(scenario: Scenario) -> str | None:
        fits = scenario.blocks <= blocks or not llm.memory.block_bytes
        return None if fits else f"its streams need {scenario.blocks} blocks of the cache, which has {blocks}"

    return split_by_reason(llm.name, scenarios, reason)


def split_by_reason(
    name: str, scenarios: Sequence[Scenario], find_reason: Callable[[Scenario], str | None]
) -> tuple[list[Scenario], ScenarioReasons]:
    reasons = [(scenario, find_reason(scenario)) for scenario in scenarios]
    possible = [scenario for scenario, reason in reasons if reason is None]
    if not possible:
        raise UsageError(f"{name} can run none of the scenarios: {reasons[0][1]}", SMALLER_SCENARIO_REMEDY)
    return possible, [(scenario, reason) for scenario, reason in reasons if reason is not None]

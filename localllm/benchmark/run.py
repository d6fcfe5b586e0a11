"""The whole of a benchmark: load, warm up, measure the ceilings, take turns through the scenarios, the ceilings
again. Nothing is left out without its reason."""

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

ReportProgress = Callable[[str], None]  # takes what is being done now


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is asked of every edition."""

    grid: ScenarioGrid
    rounds: int
    seed: int = 0
    text: str | None = None  # that prompts are cut from; None: random tokens
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
    """A model as it is stored, or what `--quant` makes of it, which is made now where it was not."""
    if quant is None:
        return find_subject(model, settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    ref = resolve_model(model)
    path = find_or_quantize(read_header(ref.path), quant, settings.home)
    found = find_subject(str(path), settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    return replace(found, name=f"{ref.name} in {quant.upper()}")


def run_benchmark(
    editions: Sequence[Subject], plan: BenchmarkPlan, report_progress: ReportProgress = lambda text: None
) -> BenchmarkResult:
    """One edition after the other. Raises UsageError where no scenario of one can run, and what `load` raises."""
    listener = NoiseMeter()
    return make_result(plan, listener, [measure_model(edition, plan, report_progress) for edition in editions])


def make_result(
    plan: BenchmarkPlan,
    noise_meter: NoiseMeter,
    editions: Sequence[ModelResult],
    compared: Sequence[PairedComparison] = (),
) -> BenchmarkResult:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return BenchmarkResult(
        now,
        describe_machine(),
        noise_meter.stop(),
        plan.rounds,
        plan.seed,
        plan.text_name,
        plan.drafts,
        tuple(editions),
        tuple(compared),
    )


def measure_model(edition: Subject, plan: BenchmarkPlan, tell: ReportProgress) -> ModelResult:
    possible, left_out = runnable_scenarios(edition, plan.grid)
    alone = reset_peak_bytes(resolve_device(edition.device))
    tell(f"loading {edition.name}")
    with closing(load_model(edition, required_context(possible, edition.config.max_context))) as llm:
        held, full = fitting_scenarios(llm, possible)
        contestant = prepare_model(edition, llm, plan, held, tell)
        for number in range(plan.rounds):
            for scenario in held:
                tell(f"{edition.name}: {scenario}, round {number + 1} of {plan.rounds}")
                contestant.run_round(scenario)
        tell("measuring this machine")
        contestant.measure_ceilings()
        return contestant.model_result([*left_out, *full], alone=alone)


def prepare_model(
    edition: Subject, llm: LLM, plan: BenchmarkPlan, scenarios: Sequence[Scenario], tell: ReportProgress
) -> BenchmarkedModel:
    """Warmed up, and beside ceilings."""
    set_drafting(llm, plan.drafts)
    contestant = BenchmarkedModel(edition, llm, make_prompt_source(edition, plan), scenarios)
    tell(f"warming up {edition.name}")
    contestant.warm_up()
    tell("measuring this machine")
    contestant.measure_ceilings()
    return contestant


def set_drafting(llm: LLM, wanted: bool) -> None:
    """With the drafts of the model as it was loaded, or without. Raises UsageError where it has none."""
    engine = llm.worker.engine
    if wanted and engine.drafter is None:
        raise UsageError(f"nothing drafts for {llm.name}", "leave out --draft, or set LOCALLLM_DRAFT to lookup")
    if not wanted:

        def without() -> None:
            engine.drafter = None

        llm.worker.call(without)


def load_model(edition: Subject, context: int) -> LLM:
    """Raises DoesNotFit with what may help here, where --context is no flag."""
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


def runnable_scenarios(edition: Subject, asked: ScenarioGrid) -> tuple[list[Scenario], ScenarioReasons]:
    """Which scenarios the model and the engine know, and why not the others. Raises UsageError where none is
    left."""
    known = edition.config.max_context
    scenarios = asked.scenarios(known)
    return split_by_reason(edition.name, scenarios, lambda scenario: unrunnable_reason(scenario, known))


def fitting_scenarios(llm: LLM, scenarios: Sequence[Scenario]) -> tuple[list[Scenario], ScenarioReasons]:
    """Those whose streams the cache holds all at once."""
    blocks = llm.memory.blocks

    def why(scenario: Scenario) -> str | None:
        fits = scenario.blocks <= blocks or not llm.memory.block_bytes
        return None if fits else f"its streams need {scenario.blocks} blocks of the cache, which has {blocks}"

    return split_by_reason(llm.name, scenarios, why)


def split_by_reason(
    name: str, scenarios: Sequence[Scenario], why: Callable[[Scenario], str | None]
) -> tuple[list[Scenario], ScenarioReasons]:
    reasons = [(scenario, why(scenario)) for scenario in scenarios]
    possible = [scenario for scenario, reason in reasons if reason is None]
    if not possible:
        raise UsageError(f"{name} can run none of the scenarios: {reasons[0][1]}", SMALLER_SCENARIO_REMEDY)
    return possible, [(scenario, reason) for scenario, reason in reasons if reason is not None]

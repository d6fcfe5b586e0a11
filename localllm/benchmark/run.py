"""Runs a benchmark: load, warm up, measure ceilings, run all scenarios in turn, measure ceilings again.

Every scenario left out is reported with its reason.
"""

import datetime
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from localllm.arch.cost import SequenceStep, bytes_read, parameter_count
from localllm.benchmark import figures
from localllm.benchmark.machine import NoiseMeter, describe_machine
from localllm.benchmark.measure import Round, RoundRunner
from localllm.benchmark.products import ProductRate, measure_products
from localllm.benchmark.result import BenchmarkResult, Loaded, ModelResult, PairedComparison, ScenarioResult
from localllm.benchmark.roofline import Ceilings, compute_roofline, measure_ceilings
from localllm.benchmark.scenario import PromptSource, Scenario, ScenarioGrid, required_context, unrunnable_reason
from localllm.benchmark.summary import check_pairs, paired_ratio
from localllm.checkpoint.facts import tensor_formats
from localllm.checkpoint.header import read_header
from localllm.comparison.subject import Subject, find_subject, fits_together
from localllm.errors import DoesNotFit, UsageError
from localllm.hardware.device import device_name, peak_bytes, reset_peak_bytes, resolve_device
from localllm.hub.resolve import resolve_model
from localllm.llm.llm import LLM
from localllm.plan.fit import LoadOptions
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING
from localllm.plan.weights import representative_matrix
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes
from localllm.quantize.quantizer import find_or_quantize
from localllm.settings import Settings

SMALLER_SCENARIO_REMEDY = "ask for shorter prompts and answers, less depth or fewer streams"
RANDOM_PROMPTS = "random tokens"
ReportProgress = Callable[[str], None]  # receives the current activity
RecordSteps = Callable[[LLM, str], object]  # receives a model and its name


@dataclass(frozen=True)
class BenchmarkPlan:
    """The measurement to run for every model."""

    grid: ScenarioGrid
    rounds: int
    seed: int = 0
    text: str | None = None  # source of prompts; None for random tokens
    text_name: str = RANDOM_PROMPTS
    drafts: bool = False
    explain: bool = False  # measure the products with the model's own weights
    record_steps: RecordSteps = lambda llm, name: None  # stores the durations of a model's steps


class BenchmarkedModel:
    """A loaded model being measured: its warm-up, rounds and ceilings, and the results."""

    def __init__(self, subject: Subject, llm: LLM, prompts: PromptSource, scenarios: Sequence[Scenario]):
        self.subject = subject
        self.llm = llm
        self.runner = llm.worker.engine.runner
        self.prefill_chunk = llm.worker.engine.token_budget
        self.element_bytes = ELEMENT_BYTES[llm.dtype], kv_element_bytes(llm.kv_dtype)
        self.round_runner = RoundRunner(llm, prompts)
        self.rounds: dict[Scenario, list[Round]] = {scenario: [] for scenario in scenarios}
        self.ceilings: list[Ceilings] = []
        self.peak_bytes = 0
        self.products: tuple[ProductRate, ...] | None = None

    def warm_up(self) -> None:
        for scenario in self.rounds:
            self.round_runner.warm_up(scenario)

    def run_round(self, scenario: Scenario) -> None:
        self.rounds[scenario].append(self.round_runner.run_round(scenario))

    def measure_ceilings(self) -> None:
        """Measure for the steps that scenarios will have and rounds had.

        Its memory does not count as the model's.
        """
        device = self.runner.device
        phases = [figures.decode_phase(phase) for rounds in self.rounds.values() for phase in rounds]
        step_tokens = {sum(share.tokens for share in phase.shares) for phase in phases if phase}
        self.peak_bytes = max(self.peak_bytes, peak_bytes(device))
        measured = measure_ceilings(
            representative_matrix(self.subject.header),
            self.runner.model.dtype,
            device,
            self.llm.worker.threads,
            step_tokens.union(*((scenario.batch, self.prefill_rows(scenario)) for scenario in self.rounds)),
            max(map(self.step_bytes, self.rounds)),
        )
        self.ceilings.append(measured)
        reset_peak_bytes(device)

    def measure_products(self) -> None:
        """Measure the products with the model's own weights, which nothing else uses meanwhile."""
        model, threads = self.runner.model, self.llm.worker.threads
        self.products = measure_products(model, model.dtype, self.runner.device, threads)

    def prefill_rows(self, scenario: Scenario) -> int:
        """Return the average tokens per prefill step; tokens that do not fill a cached block are computed
        again.
        """
        tokens = scenario.batch * (scenario.prompt + scenario.depth % BLOCK_SIZE)
        return -(-tokens // -(-tokens // self.prefill_chunk))

    def step_bytes(self, scenario: Scenario) -> int:
        """Return the bytes read by the last decoding step."""
        element, kv = self.element_bytes
        step = (SequenceStep(1, scenario.tokens, sequences=scenario.batch),)
        return bytes_read(self.llm.config, self.llm.memory.weights, step, element, kv)

    def scenario_result(self, scenario: Scenario, best: Ceilings) -> ScenarioResult:
        """Compute the rooflines of the median round, the faster one if their number is even."""
        rounds = self.rounds[scenario]
        cost = (self.llm.config, self.llm.memory.weights, *self.element_bytes)
        decode_phases = sorted(filter(None, map(figures.decode_phase, rounds)), key=lambda one: one.step_s)
        prefill_phases = sorted(map(figures.prefill_phase, rounds), key=lambda one: one.seconds)
        decode, prefill = (
            decode_phases[(len(decode_phases) - 1) // 2] if decode_phases else None,
            prefill_phases[(len(prefill_phases) - 1) // 2],
        )
        return ScenarioResult(
            scenario,
            tuple(rounds),
            decode and compute_roofline(figures.decode_work(decode, *cost), decode.step_s, best),
            compute_roofline(figures.prefill_work(prefill, *cost, self.prefill_chunk), prefill.seconds, best),
        )

    def model_result(self, left_out: Sequence[tuple[Scenario, str]], *, alone: bool) -> ModelResult:
        """Return the result after all rounds. alone: whether the process's peak memory is that of this model."""
        llm, header = self.llm, self.subject.header
        best = self.ceilings[0]
        for other in self.ceilings[1:]:
            best = best.merge_best(other)
        copies = [one.copy for one in self.ceilings]
        return ModelResult(
            Loaded(
                name=self.subject.name,
                parameters=parameter_count(llm.config),
                formats={form.name: form.nbytes for form in tensor_formats(header)},
                weight_bytes=llm.weight_bytes,
                dtype=llm.dtype,
                kv_dtype=llm.kv_dtype,
                device=llm.device,
                device_name=device_name(self.runner.device),
                threads=llm.worker.threads if llm.device == "cpu" else None,
                context=llm.context,
                load_s=llm.load_s,
                load_phases=dict(llm.load_phases),
            ),
            best,
            1 - min(copies) / max(copies),
            self.peak_bytes if alone else None,
            tuple(self.scenario_result(scenario, best) for scenario in self.rounds),
            tuple(left_out),
            self.products,
        )


def load_subject(model: str, settings: Settings, *, device: str | None, options: LoadOptions) -> Subject:
    """Return a model as stored, or the `--quant` version of it, which is made now if missing."""
    if options.quant is None:
        return find_subject(model, settings, device=device, options=options)
    ref = resolve_model(model)
    path = find_or_quantize(read_header(ref.path), options.quant, settings.home)
    subject = find_subject(str(path), settings, device=device, options=replace(options, quant=None))
    return replace(subject, name=f"{ref.name} in {options.quant.upper()}")


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
        plan.record_steps(llm, edition.name)
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
    llm.worker.step_times.clear()
    report_progress("measuring this machine")
    contestant.measure_ceilings()
    if plan.explain:
        contestant.measure_products()
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
    scenarios, max_running = grid.scenarios(max_context), MAX_RUNNING[resolve_device(edition.device).type]
    return split_by_reason(edition.name, scenarios, lambda each: unrunnable_reason(each, max_context, max_running))


def fitting_scenarios(llm: LLM, scenarios: Sequence[Scenario]) -> tuple[list[Scenario], ScenarioReasons]:
    """Return the scenarios whose streams all fit into the cache, and into a step, at once."""
    blocks, max_running = llm.memory.blocks, llm.memory.max_running

    def reason(scenario: Scenario) -> str | None:
        if scenario.batch > max_running:
            return f"memory allows {max_running} streams at once"
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


def compare_models(
    a: Subject, b: Subject, plan: BenchmarkPlan, report_progress: ReportProgress = lambda text: None
) -> BenchmarkResult:
    """Compare two models, both loaded, which run in turns on the same prompts if they share a vocabulary.

    The two measurements of each round form a pair. Raises DoesNotFit if both do not fit into memory at once,
    UsageError for too few rounds or no scenario that both can run, and what `load` raises.
    """
    check_pairs(plan.rounds)
    noise_meter = NoiseMeter()
    smaller = min(a, b, key=lambda subject: subject.config.max_context)
    possible, left_out = runnable_scenarios(smaller, plan.grid)
    context = required_context(possible, smaller.config.max_context)
    if not fits_together(a, b, context):
        raise DoesNotFit(
            f"{a.name} and {b.name} do not fit into memory together",
            "measure each alone, or use smaller ones: rounds with loading in between are no longer pairs",
        )
    with ExitStack() as resources:
        llms = []
        for subject in (a, b):
            report_progress(f"loading {subject.name}")
            llms.append(resources.enter_context(closing(load_model(subject, context))))
        for llm in llms:
            possible, not_fitting = fitting_scenarios(llm, possible)
            left_out += not_fitting
        both = [
            prepare_model(subject, llm, plan, possible, report_progress)
            for subject, llm in zip((a, b), llms, strict=True)
        ]
        for number in range(plan.rounds):
            for scenario in possible:
                report_progress(f"{scenario}, round {number + 1} of {plan.rounds}")
                for contestant in both if number % 2 else both[::-1]:
                    contestant.run_round(scenario)
        for contestant in both:
            plan.record_steps(contestant.llm, contestant.subject.name)
        report_progress("measuring this machine")
        for contestant in both:
            contestant.measure_ceilings()
        compared = [comparison for scenario in possible for comparison in compare_scenario(scenario, *both)]
        return make_result(
            plan, noise_meter, [subject.model_result(left_out, alone=False) for subject in both], compared
        )


def compare_scenario(scenario: Scenario, a: BenchmarkedModel, b: BenchmarkedModel) -> list[PairedComparison]:
    """Compare by every measure available in all rounds."""
    comparisons = []
    for measure, speed in SPEED_MEASURES.items():
        pairs = [(speed(x), speed(y)) for x, y in zip(a.rounds[scenario], b.rounds[scenario], strict=True)]
        measured = [(x, y) for x, y in pairs if x is not None and y is not None]
        if len(measured) == len(pairs):
            ratio = paired_ratio([x for x, _ in measured], [y for _, y in measured])
            comparisons.append(PairedComparison(scenario, measure, ratio))
    return comparisons


def decode_rate(answers: Round) -> float | None:
    phase = figures.decode_phase(answers)
    return phase and phase.tokens_per_s


def prefill_rate(answers: Round) -> float:
    return figures.prefill_phase(answers).tokens_per_s


def answer_rate(answers: Round) -> float:
    """Return answers per second of all streams: from the first arrival to the last token."""
    return len(answers) / (max(one.times[-1] for one in answers) - min(one.arrival for one in answers))


SPEED_MEASURES: dict[str, Callable[[Round], float | None]] = {
    "decoding": decode_rate,
    "prefill": prefill_rate,
    "whole answers": answer_rate,
}

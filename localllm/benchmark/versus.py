"""Compares two models: both loaded, running in turns round by round, on the same prompts if they share a
vocabulary.

The two measurements of each round form a pair.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing

from localllm.benchmark import figures
from localllm.benchmark.contestant import BenchmarkedModel
from localllm.benchmark.machine import NoiseMeter
from localllm.benchmark.measure import Round
from localllm.benchmark.ratio import check_pairs, paired_ratio
from localllm.benchmark.result import BenchmarkResult, PairedComparison
from localllm.benchmark.run import (
    BenchmarkPlan,
    ReportProgress,
    fitting_scenarios,
    load_model,
    make_result,
    prepare_model,
    runnable_scenarios,
)
from localllm.benchmark.scenario import Scenario, required_context
from localllm.comparison.subject import Subject, fits_together
from localllm.errors import DoesNotFit


def compare_models(
    a: Subject, b: Subject, plan: BenchmarkPlan, report_progress: ReportProgress = lambda text: None
) -> BenchmarkResult:
    """Raises DoesNotFit if both do not fit into memory at once, UsageError for too few rounds or no scenario that
    both can run, and what `load` raises.
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
        report_progress("measuring this machine")
        for contestant in both:
            contestant.measure_ceilings()
        compared = [found for scenario in possible for found in compare_scenario(scenario, *both)]
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
    found = figures.decode_phase(answers)
    return found and found.tokens_per_s


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

"""Two editions beside each other: both loaded, taking turns round by round, on the same prompts where they have
one vocabulary. What each round measured of the two is a pair."""

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
    a: Subject, b: Subject, plan: BenchmarkPlan, tell: ReportProgress = lambda text: None
) -> BenchmarkResult:
    """Raises DoesNotFit where memory does not hold both at once, UsageError for too few rounds or no scenario that
    both can run, and what `load` raises."""
    check_pairs(plan.rounds)
    listener = NoiseMeter()
    smaller = min(a, b, key=lambda one: one.config.max_context)
    possible, left_out = runnable_scenarios(smaller, plan.grid)
    context = required_context(possible, smaller.config.max_context)
    if not fits_together(a, b, context):
        raise DoesNotFit(
            f"memory does not hold {a.name} and {b.name} at once",
            "measure each alone, or take smaller ones: loads in between would end what makes rounds pairs",
        )
    with ExitStack() as held:
        llms = []
        for one in (a, b):
            tell(f"loading {one.name}")
            llms.append(held.enter_context(closing(load_model(one, context))))
        for llm in llms:
            possible, full = fitting_scenarios(llm, possible)
            left_out += full
        both = [prepare_model(one, llm, plan, possible, tell) for one, llm in zip((a, b), llms, strict=True)]
        for number in range(plan.rounds):
            for scenario in possible:
                tell(f"{scenario}, round {number + 1} of {plan.rounds}")
                for contestant in both if number % 2 else both[::-1]:
                    contestant.run_round(scenario)
        tell("measuring this machine")
        for contestant in both:
            contestant.measure_ceilings()
        compared = [found for scenario in possible for found in compare_scenario(scenario, *both)]
        return make_result(plan, listener, [one.model_result(left_out, alone=False) for one in both], compared)


def compare_scenario(scenario: Scenario, a: BenchmarkedModel, b: BenchmarkedModel) -> list[PairedComparison]:
    """By every measure that all rounds have."""
    found = []
    for measure, speed in SPEED_MEASURES.items():
        pairs = [(speed(x), speed(y)) for x, y in zip(a.rounds[scenario], b.rounds[scenario], strict=True)]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if len(known) == len(pairs):
            ratio = paired_ratio([x for x, _ in known], [y for _, y in known])
            found.append(PairedComparison(scenario, measure, ratio))
    return found


def decode_rate(answers: Round) -> float | None:
    found = figures.decode_phase(answers)
    return found and found.tokens_per_s


def prefill_rate(answers: Round) -> float:
    return figures.prefill_phase(answers).tokens_per_s


def answer_rate(answers: Round) -> float:
    """A second, of all streams: from the first arrival to the last token."""
    return len(answers) / (max(one.times[-1] for one in answers) - min(one.arrival for one in answers))


SPEED_MEASURES: dict[str, Callable[[Round], float | None]] = {
    "decoding": decode_rate,
    "prefill": prefill_rate,
    "whole answers": answer_rate,
}

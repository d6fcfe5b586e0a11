"""Two editions beside each other: both loaded, taking turns round by round, on the same prompts where they have
one vocabulary. What each round measured of the two is a pair."""

from collections.abc import Callable
from contextlib import ExitStack, closing

from localllm.benchmark import figures
from localllm.benchmark.contestant import Contestant
from localllm.benchmark.machine import Listener
from localllm.benchmark.measure import Round
from localllm.benchmark.ratio import check_pairs, paired_ratio
from localllm.benchmark.result import Compared, Result
from localllm.benchmark.run import Plan, Tell, begun, held_by, load, result, sorted_out
from localllm.benchmark.scenario import Scenario, context_for
from localllm.comparison.subject import Subject, fit_together
from localllm.errors import DoesNotFit


def compare(a: Subject, b: Subject, plan: Plan, tell: Tell = lambda text: None) -> Result:
    """Raises DoesNotFit where memory does not hold both at once, UsageError for too few rounds or no scenario that
    both can run, and what `load` raises."""
    check_pairs(plan.rounds)
    listener = Listener()
    smaller = min(a, b, key=lambda one: one.config.max_context)
    possible, left_out = sorted_out(smaller, plan.asked)
    context = context_for(possible, smaller.config.max_context)
    if not fit_together(a, b, context):
        raise DoesNotFit(
            f"memory does not hold {a.name} and {b.name} at once",
            "measure each alone, or take smaller ones: loads in between would end what makes rounds pairs",
        )
    with ExitStack() as held:
        llms = []
        for one in (a, b):
            tell(f"loading {one.name}")
            llms.append(held.enter_context(closing(load(one, context))))
        for llm in llms:
            possible, full = held_by(llm, possible)
            left_out += full
        both = [begun(one, llm, plan, possible, tell) for one, llm in zip((a, b), llms, strict=True)]
        for number in range(plan.rounds):
            for scenario in possible:
                tell(f"{scenario}, round {number + 1} of {plan.rounds}")
                for contestant in both if number % 2 else both[::-1]:
                    contestant.round(scenario)
        tell("measuring this machine")
        for contestant in both:
            contestant.measure_ceilings()
        compared = [found for scenario in possible for found in compared_in(scenario, *both)]
        return result(plan, listener, [one.edition(left_out, alone=False) for one in both], compared)


def compared_in(scenario: Scenario, a: Contestant, b: Contestant) -> list[Compared]:
    """By every measure that all rounds have."""
    found = []
    for measure, speed in SPEEDS.items():
        pairs = [(speed(x), speed(y)) for x, y in zip(a.rounds[scenario], b.rounds[scenario], strict=True)]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if len(known) == len(pairs):
            ratio = paired_ratio([x for x, _ in known], [y for _, y in known])
            found.append(Compared(scenario, measure, ratio))
    return found


def decoding(answers: Round) -> float | None:
    found = figures.decoding(answers)
    return found and found.tokens_per_s


def prefill(answers: Round) -> float:
    return figures.prefill(answers).tokens_per_s


def whole_answers(answers: Round) -> float:
    """A second, of all streams: from the first arrival to the last token."""
    return len(answers) / (max(one.times[-1] for one in answers) - min(one.arrival for one in answers))


SPEEDS: dict[str, Callable[[Round], float | None]] = {
    "decoding": decoding,
    "prefill": prefill,
    "whole answers": whole_answers,
}

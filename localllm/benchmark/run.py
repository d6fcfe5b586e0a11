"""The whole of a benchmark: load, warm up, measure the ceilings, take turns through the scenarios, the ceilings
again. Nothing is left out without its reason."""

import datetime
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from localllm.benchmark.contestant import Contestant
from localllm.benchmark.machine import Listener, this_machine
from localllm.benchmark.prompts import Prompts
from localllm.benchmark.result import Compared, Edition, Result
from localllm.benchmark.scenario import Asked, Scenario, context_for, refusal
from localllm.checkpoint.header import read_header
from localllm.comparison.subject import Subject, subject
from localllm.device import resolve_device, restart_peak
from localllm.errors import DoesNotFit, UsageError
from localllm.hub.resolve import resolve
from localllm.llm import LLM
from localllm.quantize.keep import kept_or_made
from localllm.settings import Settings

LESS = "ask for shorter prompts and answers, less depth or fewer streams"
RANDOM = "random tokens"

Tell = Callable[[str], None]  # takes what is being done now


@dataclass(frozen=True)
class Plan:
    """What is asked of every edition."""

    asked: Asked
    rounds: int
    seed: int = 0
    text: str | None = None  # that prompts are cut from; None: random tokens
    text_name: str = RANDOM
    drafts: bool = False


def edition_of(
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
        return subject(model, settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    ref = resolve(model)
    path = kept_or_made(read_header(ref.path), quant, settings.home)
    found = subject(str(path), settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    return replace(found, name=f"{ref.name} in {quant.upper()}")


def run(editions: Sequence[Subject], plan: Plan, tell: Tell = lambda text: None) -> Result:
    """One edition after the other. Raises UsageError where no scenario of one can run, and what `load` raises."""
    listener = Listener()
    return result(plan, listener, [measure(edition, plan, tell) for edition in editions])


def result(
    plan: Plan, listener: Listener, editions: Sequence[Edition], compared: Sequence[Compared] = ()
) -> Result:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Result(
        now,
        this_machine(),
        listener.stop(),
        plan.rounds,
        plan.seed,
        plan.text_name,
        plan.drafts,
        tuple(editions),
        tuple(compared),
    )


def measure(edition: Subject, plan: Plan, tell: Tell) -> Edition:
    possible, left_out = sorted_out(edition, plan.asked)
    alone = restart_peak(resolve_device(edition.device))
    tell(f"loading {edition.name}")
    with closing(load(edition, context_for(possible, edition.config.max_context))) as llm:
        held, full = held_by(llm, possible)
        contestant = begun(edition, llm, plan, held, tell)
        for number in range(plan.rounds):
            for scenario in held:
                tell(f"{edition.name}: {scenario}, round {number + 1} of {plan.rounds}")
                contestant.round(scenario)
        tell("measuring this machine")
        contestant.measure_ceilings()
        return contestant.edition([*left_out, *full], alone=alone)


def begun(edition: Subject, llm: LLM, plan: Plan, scenarios: Sequence[Scenario], tell: Tell) -> Contestant:
    """Warmed up, and beside ceilings."""
    drafting(llm, plan.drafts)
    contestant = Contestant(edition, llm, prompts_for(edition, plan), scenarios)
    tell(f"warming up {edition.name}")
    contestant.warm_up()
    tell("measuring this machine")
    contestant.measure_ceilings()
    return contestant


def drafting(llm: LLM, wanted: bool) -> None:
    """With the drafts of the model as it was loaded, or without. Raises UsageError where it has none."""
    engine = llm.worker.engine
    if wanted and engine.drafter is None:
        raise UsageError(f"nothing drafts for {llm.name}", "leave out --draft")
    if not wanted:

        def without() -> None:
            engine.drafter = None

        llm.worker.call(without)


def load(edition: Subject, context: int) -> LLM:
    """Raises DoesNotFit with what may help here, where --context is no flag."""
    try:
        return edition.load(context)
    except DoesNotFit as error:
        remedy = LESS if error.remedy and "--context" in error.remedy else error.remedy
        raise DoesNotFit(error.message, remedy) from None


def prompts_for(edition: Subject, plan: Plan) -> Prompts:
    tokenizer = edition.tokenizer
    text = None if plan.text is None else tokenizer.encode(plan.text)
    vocab = min(edition.config.vocab_size, tokenizer.vocab_size)
    return Prompts(vocab, tokenizer.special_ids, plan.seed, text)


Reasons = list[tuple[Scenario, str]]


def sorted_out(edition: Subject, asked: Asked) -> tuple[list[Scenario], Reasons]:
    """Which scenarios the model and the engine know, and why not the others. Raises UsageError where none is
    left."""
    known = edition.config.max_context
    scenarios = asked.scenarios(known)
    return divided(edition.name, scenarios, lambda scenario: refusal(scenario, known))


def held_by(llm: LLM, scenarios: Sequence[Scenario]) -> tuple[list[Scenario], Reasons]:
    """Those whose streams the cache holds all at once."""
    blocks = llm.memory.blocks

    def why(scenario: Scenario) -> str | None:
        fits = scenario.blocks <= blocks or not llm.memory.block_bytes
        return None if fits else f"its streams need {scenario.blocks} blocks of the cache, which has {blocks}"

    return divided(llm.name, scenarios, why)


def divided(
    name: str, scenarios: Sequence[Scenario], why: Callable[[Scenario], str | None]
) -> tuple[list[Scenario], Reasons]:
    reasons = [(scenario, why(scenario)) for scenario in scenarios]
    possible = [scenario for scenario, reason in reasons if reason is None]
    if not possible:
        raise UsageError(f"{name} can run none of the scenarios: {reasons[0][1]}", LESS)
    return possible, [(scenario, reason) for scenario, reason in reasons if reason is not None]

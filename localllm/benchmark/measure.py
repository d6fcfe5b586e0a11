"""One round of a scenario on a loaded model, through its public API: what each stream measured, and when.

Knows nothing of rates and tables; what follows from a round stands in `figures.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.benchmark.prompts import Prompts
from localllm.benchmark.scenario import Scenario
from localllm.errors import LocalLLMError
from localllm.llm import LLM, collect
from localllm.metrics import Metrics
from localllm.request import SamplingParams

WARM_UP_TOKENS = 4  # of an answer that does not count


@dataclass(frozen=True)
class Round:
    """The streams of one scenario, once."""

    arrivals: tuple[float, ...]  # seconds of `time.perf_counter()`
    metrics: tuple[Metrics, ...]


class Bench:
    """A model and the prompts for it. What stands before the prompts of one depth stays the same, and is computed
    again only where the cache has lost it."""

    def __init__(self, llm: LLM, prompts: Prompts):
        self.llm = llm
        self.prompts = prompts
        self.before: dict[int, list[list[int]]] = {}  # by depth

    def warm_up(self, scenario: Scenario) -> None:
        """Everything that a round of the scenario does, with a short answer."""
        self.round(replace(scenario, output=min(scenario.output, WARM_UP_TOKENS)))

    def round(self, scenario: Scenario) -> Round:
        return self.answer(scenario, self.new_prompts(scenario))

    def new_prompts(self, scenario: Scenario) -> list[list[int]]:
        return [self.prompts.new(scenario.prompt) for _ in range(scenario.batch)]

    def answer(self, scenario: Scenario, prompts: Sequence[Sequence[int]]) -> Round:
        """All streams at once, each to its last token. Raises LocalLLMError where one ends before."""
        before = self.before.setdefault(scenario.depth, [])
        while len(before) < scenario.batch:
            before.append(self.prompts.new(scenario.depth))
        before = before[: scenario.batch]
        for ids in filter(None, before):
            self.llm.generate(ids, SamplingParams(max_tokens=0))
        params = SamplingParams(temperature=0, max_tokens=scenario.output, ignore_eos=True)
        whole = [[*ids, *prompt] for ids, prompt in zip(before, prompts, strict=True)]
        requests = [self.llm.prepare(ids, params) for ids in whole]
        streams = [self.llm.submit(request) for request in requests]
        done = [collect(request, stream) for request, stream in zip(requests, streams, strict=True)]
        short = next((d for d in done if d.metrics.output_tokens != scenario.output), None)
        if short:
            said = f"an answer ended after {short.metrics.output_tokens} of {scenario.output} tokens"
            raise LocalLLMError(said, "measure a shorter one with --output")
        return Round(tuple(r.arrival for r in requests), tuple(d.metrics for d in done))

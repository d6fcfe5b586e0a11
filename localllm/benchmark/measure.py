"""Runs one round of a scenario on a loaded model through its public API, and records each stream's measurements.

Independent of rates and tables; results are derived from rounds in `figures.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from localllm.benchmark.scenario import PromptSource, Scenario
from localllm.errors import LocalLLMError
from localllm.llm.llm import LLM
from localllm.llm.worker import Stream
from localllm.metrics import Metrics
from localllm.request import ChatRequest, Request, SamplingParams

WARM_UP_TOKENS = 4  # of an answer that is not measured


@dataclass(frozen=True)
class StreamResult:
    """One stream of a round."""

    arrival: float  # seconds of `time.perf_counter()`
    metrics: Metrics
    # For each token: whether a step began with it; otherwise it was an accepted draft.
    begins_step: tuple[bool, ...]

    @property
    def times(self) -> list[float]:
        """When each token was output, on the clock of `arrival`."""
        return list(accumulate(self.metrics.itl_s, initial=self.arrival + self.metrics.ttft_s))

    @property
    def steps(self) -> int:
        return sum(self.begins_step)


Round = tuple[StreamResult, ...]  # the streams of a scenario, run once


class RoundRunner:
    """Runs rounds on a model. The context before the prompts of one depth stays the same, and is recomputed only
    if it was evicted from the cache.
    """

    def __init__(self, llm: LLM, prompts: PromptSource):
        self.llm = llm
        self.prompts = prompts
        self.context_ids: dict[int, list[list[int]]] = {}  # by depth

    def warm_up(self, scenario: Scenario) -> None:
        """Run a round of the scenario with a short answer."""
        self.run_round(replace(scenario, output=min(scenario.output, WARM_UP_TOKENS)))

    def run_round(self, scenario: Scenario) -> Round:
        return self.run_streams(scenario, self.make_prompts(scenario))

    def make_prompts(self, scenario: Scenario) -> list[list[int]]:
        return [self.prompts.make_prompt(scenario.prompt) for _ in range(scenario.batch)]

    def run_streams(self, scenario: Scenario, prompts: Sequence[Sequence[int]]) -> Round:
        """Run all streams at once, each to its last token. Raises LocalLLMError if one ends early."""
        contexts = self.context_ids.setdefault(scenario.depth, [])
        while len(contexts) < scenario.batch:
            contexts.append(self.prompts.make_prompt(scenario.depth))
        contexts = contexts[: scenario.batch]
        for ids in filter(None, contexts):
            self.llm.generate(ids, SamplingParams(max_tokens=0))
        params = SamplingParams(temperature=0, max_tokens=scenario.output, ignore_eos=True)
        full_prompts = [[*ids, *prompt] for ids, prompt in zip(contexts, prompts, strict=True)]
        requests = [self.llm.prepare(ChatRequest(ids, params)) for ids in full_prompts]
        streams = [self.llm.submit(request) for request in requests]
        results = tuple(read_stream(request, stream) for request, stream in zip(requests, streams, strict=True))
        incomplete = next((result for result in results if result.metrics.output_tokens != scenario.output), None)
        if incomplete:
            message = f"an answer ended after {incomplete.metrics.output_tokens} of {scenario.output} tokens"
            raise LocalLLMError(message, "measure a shorter one with --output")
        return results


def read_stream(request: Request, stream: Stream) -> StreamResult:
    """Read a stream to its end."""
    events = list(stream)
    metrics = events[-1].metrics
    assert metrics
    return StreamResult(request.arrival, metrics, tuple(not event.accepted for event in events if event.token_ids))

"""What a benchmark found, as plain numbers: of each edition of a model, of each scenario, of each round."""

from dataclasses import dataclass
from functools import cached_property

from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.figures import decode_phase, prefill_phase
from localllm.benchmark.machine import Machine, Noise
from localllm.benchmark.measure import Round
from localllm.benchmark.ratio import Ratio
from localllm.benchmark.roofline import Roofline
from localllm.benchmark.scenario import Scenario
from localllm.benchmark.summary import Distribution, RequestSummary, summarize
from localllm.hardware.measure import MIN_CPU_SHARE

MAX_STEADY_DRIFT = 0.1  # copies before and after are no further apart on a steady machine


@dataclass(frozen=True)
class Loaded:
    """A model as it ran. Sizes are bytes, times seconds."""

    name: str
    parameters: int
    formats: dict[str, int]  # bytes of the files by how weights are stored
    weight_bytes: int
    dtype: str
    kv_dtype: str
    device: str  # `cpu`, `cuda:0`
    device_name: str
    threads: int | None  # of an operation; None on a GPU
    context: int  # tokens that it was loaded with room for
    load_s: float
    load_phases: dict[str, float]


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario of one edition."""

    scenario: Scenario
    rounds: tuple[Round, ...]
    decode: Roofline | None  # None where no two steps were common to all streams
    prefill: Roofline

    @cached_property
    def requests(self) -> RequestSummary:
        """All streams of all rounds."""
        return summarize([answer.metrics for one in self.rounds for answer in one])

    @cached_property
    def decode_tokens_per_s(self) -> Distribution:
        """Of all streams together, by round."""
        found = [decode_phase(one) for one in self.rounds]
        return Distribution.of(one.tokens_per_s for one in found if one)

    @cached_property
    def prefill_tokens_per_s(self) -> Distribution:
        """Of all streams together, by round."""
        return Distribution.of(prefill_phase(one).tokens_per_s for one in self.rounds)


@dataclass(frozen=True)
class ModelResult:
    loaded: Loaded
    ceilings: Ceilings  # the better of before and after
    drift: float  # how far the copies before and after were apart, as a share of the better
    peak_bytes: int | None  # most memory while it was loaded and measured; None where that cannot be told
    scenarios: tuple[ScenarioResult, ...]
    left_out: tuple[tuple[Scenario, str], ...]  # with the reason


@dataclass(frozen=True)
class PairedComparison:
    """The first edition beside the second, in one scenario."""

    scenario: Scenario
    measure: str  # `decoding`, `prefill` or `whole answers`
    ratio: Ratio  # of their speeds


@dataclass(frozen=True)
class BenchmarkResult:
    date: str  # UTC, ISO 8601
    machine: Machine
    noise: Noise
    rounds: int
    seed: int
    prompts: str  # what they were made of
    drafts: bool
    models: tuple[ModelResult, ...]
    comparisons: tuple[PairedComparison, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What makes these numbers less than those of a quiet machine; none where nothing does."""
        found = [self.noise.warning] if self.noise.warning else []
        for edition in self.models:
            name, share = edition.loaded.name, edition.ceilings.share
            if edition.drift > MAX_STEADY_DRIFT:
                found.append(f"copies beside {name} were {edition.drift:.0%} apart before and after its rounds")
            if share < MIN_CPU_SHARE:
                found.append(f"the ceilings beside {name} were measured with {share:.0%} of the processors' time")
        return found

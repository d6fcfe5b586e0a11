"""The results of a benchmark as plain numbers, by model, scenario and round."""

from dataclasses import dataclass
from functools import cached_property

from localllm.benchmark.figures import decode_phase, prefill_phase
from localllm.benchmark.machine import Machine, Noise
from localllm.benchmark.measure import Round
from localllm.benchmark.products import ProductRate
from localllm.benchmark.roofline import Ceilings, Roofline
from localllm.benchmark.scenario import Scenario
from localllm.benchmark.summary import Distribution, Ratio, RequestSummary, summarize
from localllm.hardware.measure import MIN_CPU_SHARE

MAX_STEADY_DRIFT = 0.1  # most that copies before and after differ on a steady machine


@dataclass(frozen=True)
class Loaded:
    """A model as it was run. Sizes are in bytes, times in seconds."""

    name: str
    parameters: int
    formats: dict[str, int]  # bytes in the files, by weight format
    weight_bytes: int
    dtype: str
    kv_dtype: str
    device: str  # `cpu`, `cuda:0`
    device_name: str
    threads: int | None  # per operation; None on a GPU
    context: int  # capacity in tokens
    load_s: float
    load_phases: dict[str, float]


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario of one model."""

    scenario: Scenario
    rounds: tuple[Round, ...]
    decode: Roofline | None  # None if no two steps were common to all streams
    prefill: Roofline

    @cached_property
    def requests(self) -> RequestSummary:
        """All streams of all rounds."""
        return summarize([answer.metrics for one in self.rounds for answer in one])

    @cached_property
    def decode_tokens_per_s(self) -> Distribution:
        """Rates of all streams together, one per round."""
        phases = [decode_phase(one) for one in self.rounds]
        return Distribution.of(one.tokens_per_s for one in phases if one)

    @cached_property
    def prefill_tokens_per_s(self) -> Distribution:
        """Rates of all streams together, one per round."""
        return Distribution.of(prefill_phase(one).tokens_per_s for one in self.rounds)


@dataclass(frozen=True)
class ModelResult:
    loaded: Loaded
    ceilings: Ceilings  # the better of before and after
    drift: float  # difference between the copy rates before and after, as a share of the better
    peak_bytes: int | None  # peak memory while it was loaded and measured; None if unknown
    scenarios: tuple[ScenarioResult, ...]
    left_out: tuple[tuple[Scenario, str], ...]  # with the reason
    products: tuple[ProductRate, ...] | None = None  # None unless requested


@dataclass(frozen=True)
class PairedComparison:
    """The first model compared with the second, in one scenario."""

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
    prompts: str  # their source
    drafts: bool
    models: tuple[ModelResult, ...]
    comparisons: tuple[PairedComparison, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Conditions that make these numbers differ from those of a quiet machine, if any."""
        warnings = [self.noise.warning] if self.noise.warning else []
        for model in self.models:
            name, share = model.loaded.name, model.ceilings.share
            if model.drift > MAX_STEADY_DRIFT:
                warnings.append(
                    f"copy rates measured with {name} differed by {model.drift:.0%} before and after its rounds"
                )
            if share < MIN_CPU_SHARE:
                warnings.append(f"the ceilings for {name} were measured with {share:.0%} of the processors' time")
        return warnings

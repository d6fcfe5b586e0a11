"""The result of a GPU's self-test: as rows for the terminal, as data for `--json`, and stored for `plan`.

Needs no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from localllm.formatting import format_bytes, format_flops, format_rate
from localllm.plan import runs


@dataclass(frozen=True)
class CheckedModel:
    """Kernels that a generated model has called, compared with their references."""

    model: str
    kernels: dict[str, int]  # calls by operation/kernel
    faults: list[str]


@dataclass(frozen=True)
class ProductRate:
    weights: str  # format
    rows: int  # of x
    bytes_per_s: float  # of weights
    of_copy: float  # share of a copy's rate


@dataclass(frozen=True)
class StepRate:
    """A decode step of one sequence through the engine."""

    model: str
    weights: str  # format
    context: int  # tokens in the cache
    tokens_per_s: float
    bytes_per_s: float
    of_copy: float  # share of a copy's rate
    prefill_flops: float  # operations per second while the context is computed
    without_graphs: str  # reason; empty if steps are captured


@dataclass
class SelfTest:
    device: str
    copy: float = 0.0  # bytes per second that a copy reads and writes
    flops: float = 0.0  # operations per second of dense products
    checked: list[CheckedModel] = field(default_factory=list)
    products: list[ProductRate] = field(default_factory=list)
    steps: list[StepRate] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # parts, with the reason
    seconds: float = 0.0

    def share_of_copy(self, rate: float) -> float:
        return rate / self.copy if self.copy else 0.0

    @property
    def faults(self) -> list[str]:
        return [f"{checked.model}: {fault}" for checked in self.checked for fault in checked.faults]


def self_test_rows(test: SelfTest) -> Iterator[tuple[str, str]]:
    """Rows of checked models, products and decode steps."""
    for checked in test.checked:
        verdict = f"{len(checked.faults)} wrong" if checked.faults else "right"
        yield checked.model, f"{len(checked.kernels)} kernels in {sum(checked.kernels.values())} calls: {verdict}"
    yield "copy", f"{format_bytes(test.copy)}/s read and written, products {format_flops(test.flops)}"
    for form, rates in groupby(test.products, key=lambda rate: rate.weights):
        each = (f"{format_bytes(r.bytes_per_s)}/s ({r.of_copy:.0%} of a copy) with M = {r.rows}" for r in rates)
        yield f"products in {form}", ", ".join(each)
    for step in test.steps:
        rate = f"{format_bytes(step.bytes_per_s)}/s, {step.of_copy:.0%} of a copy"
        eager = f", without graphs: {step.without_graphs}" if step.without_graphs else ""
        name = f"{step.model} in {step.weights}"
        yield name, f"{format_rate(step.tokens_per_s)} at {step.context} tokens, {rate}{eager}"
    yield "duration", f"{test.seconds:.0f} s"


def store(result: SelfTest, home: Path, note: Callable[[str], None]) -> None:
    """Store the measured steps for `plan`, in place of earlier ones of the same GPU, model and format."""
    measured = [
        runs.Run(
            model=f"{step.model} model",
            device=result.device,
            dtype="bfloat16",
            form=step.weights.upper(),
            threads=0,
            context=step.context,
            bytes_per_token=step.bytes_per_s / step.tokens_per_s,
            tokens_per_s=step.tokens_per_s,
            flops_per_s=step.prefill_flops,
        )
        for step in result.steps
    ]
    file = home / runs.SELF_TEST_FILE
    repeated = {(run.device, run.model, run.form) for run in measured}
    others = [run for run in runs.read(file, note) if (run.device, run.model, run.form) not in repeated]
    runs.write(file, [*others, *measured], note)

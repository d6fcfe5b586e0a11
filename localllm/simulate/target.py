"""The engine and the cost of its steps for a model on a device: one of the catalogue, by its roofline, or this
machine, by the steps that it has measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel, UsageError
from localllm.formatting import format_seconds
from localllm.hardware.catalog import DeviceSpec
from localllm.plan import step_times
from localllm.plan.fit import DeviceMemory, Fit, LoadOptions, check_fit
from localllm.plan.memory import BLOCK_SIZE, TOKEN_BUDGET, MemoryPlan
from localllm.plan.parallel import Link, Parallel, default_link
from localllm.plan.speed import ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE, ASSUMED_LAYER_S
from localllm.plan.step_times import StepSetup
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes
from localllm.runtime.step import StepShape
from localllm.simulate.cost import Cost, FittedCost, ParallelCost, RooflineCost, entry_delay, why_not_fitted
from localllm.simulate.simulation import EngineSetup

ONE_DEVICE = Parallel()
CPU_SEQUENCE_S = 60e-6  # of a CPU's step, for attention's calls, sampling and delivery: of `demo` on an AMD EPYC


@dataclass(frozen=True)
class ReachedRates:
    """The rates that steps reach."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Target:
    """A model on a device."""

    model: str
    device: str
    fit: Fit
    setup: EngineSetup
    make_cost: Callable[[], Cost]
    rates: ReachedRates | None  # of a roofline: what utilisation is a share of
    watts: float | None = None
    devices: int = 1  # of each replica
    device_model: str = ""  # name of a single device in the catalogue
    link: Link | None = None  # between replicas; None if it is not known
    machine: DeviceSpec | None = None  # a device of this machine whose rates were measured for this

    @property
    def token_bytes(self) -> float:
        """Bytes of keys and values of a token, in all layers."""
        return self.fit.needs.block_bytes / BLOCK_SIZE

    @property
    def cost(self) -> Cost:
        """A new cost, whose totals are 0."""
        return self.make_cost()


@dataclass(frozen=True)
class RecordedFit:
    """The cost of steps on this machine, and what a request waits besides."""

    cost: FittedCost
    entry_s: float  # from its arrival to the engine


def engine_setup(memory: MemoryPlan, device_type: str) -> EngineSetup:
    """Return the engine that `load` builds with this memory."""
    return EngineSetup(
        blocks=memory.blocks,
        block_size=BLOCK_SIZE,
        token_budget=TOKEN_BUDGET[device_type],
        max_running=memory.max_running,
        context=memory.context,
        asynchronous=device_type != "cpu",
    )


def checked_memory(fit: Fit) -> MemoryPlan:
    assert fit.memory  # `checked_fit` has raised an error otherwise
    return fit.memory


def checked_fit(header: Header, device: DeviceMemory, options: LoadOptions, name: str) -> Fit:
    """Raises DoesNotFit, and UnsupportedModel for a model whose requests are not answered step by step."""
    config = parse_config(header.config)
    if config.encoder:
        raise UnsupportedModel(f"{name} is an embedding model, which has no steps to simulate")
    return check_fit(header, device, options, name=name)


def roofline_target(
    header: Header,
    device: DeviceSpec,
    options: LoadOptions,
    *,
    name: str,
    shares: tuple[float, float] = (ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE),
    step_s: float | None = None,
    sequence_s: float = 0.0,
    source: str | None = None,
    reason: str = "no step was measured",
    parallel: Parallel = ONE_DEVICE,
) -> Target:
    """Return a model on a device or several, whose steps reach these shares of its bandwidth and arithmetic rate.

    step_s: time of a step besides reading and computing, None for an assumption; sequence_s: the same for each
    sequence of it; source: describes all this; reason: why it is assumed, without a source.
    """
    config, single = parse_config(header.config), device
    parallel.check(config)
    device = parallel.joined(device)
    fit = checked_fit(header, device, options, name)
    extra_s = ASSUMED_LAYER_S * len(config.layers) if step_s is None else step_s
    rates = ReachedRates(device.bandwidth * shares[0], device.flops * shares[1])
    text = source or (
        f"roofline of the {single.name} at {shares[0]:.0%} of its published bandwidth and {shares[1]:.0%} of its "
        f"arithmetic rate, and {extra_s * 1e6:.0f} µs more a step: assumed, {reason}"
    )

    if parallel.devices > 1:
        assert parallel.link
        speed, latency = f"{parallel.link.bandwidth / 1e9:g} GB/s", f"{parallel.link.latency_s * 1e6:g} µs"
        text += f"; exchanges over {speed} and {latency} each, which do not overlap with computing"

    def make_cost() -> RooflineCost:
        element, kv = ELEMENT_BYTES[fit.dtype], kv_element_bytes(fit.kv_dtype)
        if parallel.devices == 1:
            return RooflineCost(config, fit.weights, element, kv, rates, text, extra_s, sequence_s)
        cost = ParallelCost(config, fit.weights, element, kv, rates, text, extra_s, sequence_s)
        cost.parallel = parallel
        return cost

    return Target(
        name,
        device.name if parallel.devices == 1 else f"{parallel.devices} x {device.name}",
        fit,
        engine_setup(checked_memory(fit), device.device_type),
        make_cost,
        ReachedRates(single.bandwidth * parallel.devices, single.flops * parallel.devices),
        device.watts,
        devices=parallel.devices,
        link=parallel.link or default_link(single),
        device_model=single.name,
    )


def fitted_target(
    header: Header,
    device: DeviceMemory,
    options: LoadOptions,
    fitted: RecordedFit,
    *,
    name: str,
    device_name: str,
) -> Target:
    """Return a model on this machine, whose steps take what measured ones took."""
    fit = checked_fit(header, device, options, name)
    setup = replace(engine_setup(checked_memory(fit), device.device_type), entry_s=fitted.entry_s)
    return Target(name, device_name, fit, setup, lambda: fitted.cost, None)


def fit_recorded(
    home: Path, setup: StepSetup, note: Callable[[str], None], *, name: str, drafts: bool = False, seed: int = 0
) -> RecordedFit | str:
    """Return a fit to the steps of a model that this machine has recorded, with another number of threads if there
    are none with the same. Returns why there is none if they do not determine it, or its error is too large.

    drafts: whether sequences have drafts in what is predicted
    """
    setups = step_times.read_records(home / step_times.FILE, note)
    others = (found for each, found in reversed(setups.items()) if replace(each, threads=setup.threads) == setup)
    records = setups.get(setup) or next(others, step_times.Records([], []))
    timed = [(StepShape(*(int(n) for n in step[:-1])), step[-1]) for step in records.steps]
    if reason := why_not_fitted(timed, name, drafts=drafts):
        return reason
    cost = FittedCost(timed, f"of {name} on this machine", seed)
    if not cost.error.is_acceptable:
        return (
            f"a fit to the {len(timed)} recorded steps of {name} is too inaccurate: of {cost.error.steps} others, "
            f"{cost.error}"
        )
    entry_s = entry_delay(records.entry_waits)
    if entry_s:
        cost.source += f"; requests take {format_seconds(entry_s)} to the engine"
    return RecordedFit(cost, entry_s)


def parse_shares(text: str) -> tuple[float, float]:
    """Parse `0.7` or `0.7,0.55`: shares of bandwidth and of the arithmetic rate. Raises UsageError."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) not in (1, 2) or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"--efficiency is {text!r}", "give one or two shares from 0 to 1, such as 0.7,0.55")
    return shares[0], shares[-1]

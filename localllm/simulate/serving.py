"""Number of users that a device serves within latency objectives, by its settings: for `plan --users --slo`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from localllm.errors import DoesNotFit
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.fit import LoadOptions
from localllm.simulate.capacity import Objective, find_capacity
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import simulate
from localllm.simulate.target import Target

FP8_ARCH = 89  # from which GPUs compute with FP8
QUANTS = ("int8", "int4")
P95 = 1  # index in PERCENTILES
FIRST_USERS = 32  # of the search
MOST_OVERLOAD = 4  # times the users served, up to which the planned users are simulated

MakeTarget = Callable[[LoadOptions], Target]
MakeLoad = Callable[[Target], LoadPlan]


@dataclass(frozen=True)
class ServingOption:
    """A setting of `serve`, and the load that it serves."""

    flags: str  # of `serve`; empty: none
    quant: str | None
    kv_dtype: str
    refusal: str | None  # why the model does not fit; then the other fields are empty
    capacity: int = 0  # users within the objectives
    # With the planned users, unless they are many times more: share of requests that meet all objectives, and p95.
    met: float | None = None
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    step_times: str = ""


@dataclass(frozen=True)
class ServingPlan:
    """The settings that were tried, in the order of their loss of quality, to the first that serves the users."""

    users: int
    load: LoadPlan
    objective: Objective
    options: tuple[ServingOption, ...]
    not_compared: tuple[str, ...] = ()  # flags of settings without recorded steps, beside others that have them

    @property
    def choice(self) -> ServingOption | None:
        """The first setting that serves the users on one device."""
        return next((option for option in self.options if option.capacity >= self.users), None)

    @property
    def best(self) -> ServingOption | None:
        """The setting that serves most users; None if none serves any."""
        best = max(self.options, key=lambda option: option.capacity)
        return best if best.capacity else None

    @property
    def devices(self) -> int | None:
        """Devices that the users need with the best setting, each with its share; None if none serves any."""
        return -(-self.users // self.best.capacity) if self.best else None


def serving_settings(
    options: LoadOptions, device: DeviceSpec | None, *, can_quantize: bool
) -> list[tuple[str, LoadOptions]]:
    """Return flags and options to try: those given, fewer bits for keys and values, and for weights.

    device: a GPU of the catalogue; None for this machine. can_quantize: `--quant` is possible and was not given
    """
    narrow = "fp8" if device and device.cores and device.cores.arch >= FP8_ARCH else "int8"
    kv_dtypes = [options.kv_dtype, narrow] if options.kv_dtype == "auto" else [options.kv_dtype]
    quants = [options.quant, *QUANTS] if can_quantize else [options.quant]
    settings: list[tuple[str, LoadOptions]] = []
    for quant in quants:
        for kv_dtype in kv_dtypes:
            flags = [
                *([f"--quant {quant}"] if quant else []),
                *([f"--kv-dtype {kv_dtype}"] if kv_dtype != "auto" else []),
            ]
            settings.append((" ".join(flags), replace(options, quant=quant, kv_dtype=kv_dtype)))
    return settings


def plan_serving(
    settings: Iterable[tuple[str, LoadOptions]],
    make_target: MakeTarget,
    make_load: MakeLoad,
    objective: Objective,
    report: Callable[[str], None] = lambda text: None,
) -> ServingPlan:
    """Simulate settings in turn until one serves the load's users."""
    tried: list[ServingOption] = []
    load: LoadPlan | None = None
    for flags, options in settings:
        try:
            target = make_target(options)
        except DoesNotFit as error:
            tried.append(ServingOption(flags, options.quant, options.kv_dtype, error.message))
            continue
        load = make_load(target)
        option = measure_setting(flags, options, target, load, objective, report)
        tried.append(option)
        if load.users and option.capacity >= load.users:
            break
    if load is None or load.users is None:
        raise DoesNotFit(tried[-1].refusal or "no setting fits", "plan for a device with more memory")
    return ServingPlan(load.users, load, objective, tuple(tried))


def measure_setting(
    flags: str,
    options: LoadOptions,
    target: Target,
    load: LoadPlan,
    objective: Objective,
    report: Callable[[str], None],
) -> ServingOption:
    """Simulate the planned users, and find how many could be served."""
    assert load.users
    few = load.scaled_to(min(load.users, FIRST_USERS))  # far too many users would take long, and show nothing
    capacity = find_capacity(few, objective, target, lambda text: report(f"{flags or 'as planned'}: {text}"))
    served, cost = int(capacity.amount), target.cost
    option = ServingOption(flags, options.quant, target.fit.kv_dtype, None, served, step_times=cost.source)
    if load.users > MOST_OVERLOAD * max(1, served):
        return option
    simulated = simulate(load, target.setup, cost)
    ttft, tpot = (simulated.percentiles(name)[P95] for name in ("ttft", "tpot"))
    return replace(
        option,
        met=objective.attained(simulated),
        ttft_p95_s=None if math.isnan(ttft) else ttft,
        tpot_p95_s=None if math.isnan(tpot) else tpot,
    )

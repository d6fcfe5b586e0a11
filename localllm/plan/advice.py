"""Ways to run a model on several devices and machines: the parts that each has, what they send, and the speed.

The rule: a model that fits a device gets replicas, or processes for prompts where these serve more. One that does
not is divided by tensor parallelism within a machine, by whole experts if columns cannot be divided, or into
stages if its layers cannot be divided. One that does not fit a machine has stages on several, with a worker for
each but the first, whose layers the devices of their machines divide if they can be.
"""

from dataclasses import dataclass, replace

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel, UsageError
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.fit import (
    Fit,
    LoadOptions,
    divisions_of,
    fit_model,
    fit_on_larger_machine,
    flags_of,
    model_needs,
    powers_of_2,
)
from localllm.plan.memory import BLOCK_SIZE
from localllm.plan.parallel import Link, Parallel, default_link, predict_divided_speed
from localllm.plan.plan import Expectation
from localllm.plan.speed import (
    ASSUMED_BANDWIDTH_SHARE,
    ASSUMED_FLOPS_SHARE,
    ASSUMED_LAYER_S,
    Speed,
)

ASSUMED_NETWORK = Link(1.25e9, 50e-6)  # between machines: Ethernet of 10 Gbit/s


@dataclass(frozen=True)
class Pool:
    """Machines with equal devices."""

    device: DeviceSpec  # with the number of these devices in each machine
    machines: int = 1
    link: Link | None = None  # between devices of a machine; None: the device's own
    network: Link = ASSUMED_NETWORK

    @property
    def devices(self) -> int:
        return self.device.count * self.machines

    def devices_of(self, options: LoadOptions) -> int:
        """Return the number of devices that the options divide a model among: the processes of a stage share a
        CPU."""
        return options.pipeline_parallel * self.stage_devices(options)

    def stage_devices(self, options: LoadOptions) -> int:
        return 1 if self.device.device_type == "cpu" else options.tensor_parallel

    def engines(self, options: LoadOptions) -> int:
        """Return how many engines that are divided so the pool has room for, within machines if they fit."""
        if not self.is_spread(options):
            return self.machines * (self.device.count // self.devices_of(options))
        stages_in_machine = self.device.count // self.stage_devices(options)
        return self.machines * stages_in_machine // options.pipeline_parallel

    def divide(self, options: LoadOptions) -> Parallel:
        """Return the devices among which options divide a model: stages are on different machines unless one
        machine has room for all."""
        link = self.link or default_link(self.device)
        return Parallel(
            options.tensor_parallel,
            options.pipeline_parallel,
            link,
            self.network if self.is_spread(options) else link,
            options.expert_parallel,
        )

    def is_spread(self, options: LoadOptions) -> bool:
        """Return whether these options divide a model among several machines."""
        return self.devices_of(options) > self.device.count

    def device_of(self, options: LoadOptions) -> DeviceSpec:
        """Return the device, with the memory of each stage if they are on several machines."""
        on_cpu = self.device.device_type == "cpu"
        share = self.device.memory_bytes // (options.tensor_parallel if on_cpu else 1)
        memory = (share,) * options.pipeline_parallel
        return replace(self.device, stage_bytes=memory) if self.is_spread(options) else self.device


@dataclass(frozen=True)
class Arrangement:
    """A model on some devices of a pool. Sizes are of the process with the least room."""

    options: LoadOptions  # that divide it
    parallel: Parallel
    engines: int  # of these that the pool has devices for
    fit: Fit | None = None  # None if the model cannot be divided so
    refusal: str | None = None  # why it does not fit, or cannot be divided
    sent_bytes: float = 0.0  # by each device for a decoded token
    speed: Speed | None = None  # of a single user; None if it cannot be divided so

    @property
    def fits(self) -> bool:
        return self.fit is not None and self.fit.fits

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache of an engine; 0 if it does not fit."""
        return self.fit.memory.blocks * BLOCK_SIZE if self.fit and self.fit.memory else 0

    @property
    def flags(self) -> str:
        """Flags of `serve` for one engine; empty for a single process."""
        return flags_of(self.options)


@dataclass(frozen=True)
class PrefillAdvice:
    """Engines for prompts apart from those for answers, which serve more than engines that compute both."""

    prefill: int  # engines for prompts
    decode: int  # for answers
    requests_per_s: float  # within objectives, simulated
    requests_per_s_together: float  # of as many engines that compute both
    reason: str  # for the reader


@dataclass(frozen=True)
class Advice:
    """The ways to run a model on a pool."""

    pool: Pool
    arrangements: tuple[Arrangement, ...]  # in the order of preference
    source: str  # of durations
    needed: Arrangement | None  # on one machine with more devices, if none fits a machine of the pool
    prefill: PrefillAdvice | None = None  # if the model fits one device, and this serves more

    @property
    def chosen(self) -> Arrangement | None:
        """The first that fits."""
        return next((each for each in self.arrangements if each.fits), None)


def advise(
    header: Header,
    pool: Pool,
    options: LoadOptions,
    *,
    name: str,
    prompt: int,
    expectation: Expectation | None = None,
) -> Advice:
    """Return the ways to run a model on a pool, among them the division that the options request.

    expectation: rates that steps reach on one device, None for assumed ones. Raises UsageError for invalid
    options, and like `parse_config`.
    """
    config = parse_config(header.config)
    device = pool.device
    rates = expectation or assumed_rates(device, config)
    requested, options = options, options.in_one_process()
    whole = model_needs(header, config, device.device_type, options, name=name)

    def arrange(pool: Pool, divided: LoadOptions) -> Arrangement:
        parallel, engines = pool.divide(divided), pool.engines(divided)
        if divided == replace(requested, stage_shares=()):
            divided = requested
        if pool.is_spread(divided):
            if (size := pool.stage_devices(divided)) > pool.device.count:
                refusal = (
                    f"--tensor-parallel {size} needs {size} devices in each machine, which has {pool.device.count}"
                )
                return Arrangement(divided, parallel, engines, refusal=refusal)
            hosts = range(2, divided.pipeline_parallel + 1)
            divided = replace(divided, workers=tuple(f"HOST{number}:PORT" for number in hosts))
        try:
            fit = fit_model(header, config, pool.device_of(divided), divided, name=name)
        except (UnsupportedModel, UsageError) as error:
            return Arrangement(divided, parallel, engines, refusal=error.message)
        speed = predict_divided_speed(
            config,
            whole,
            parallel,
            rates,
            context=fit.context,
            prompt=min(prompt, fit.context),
            step_s=rates.step_s,
        )
        sent = sum(parallel.exchanged_bytes(config, 1, 1))
        refusal = fit.refusal.message if fit.refusal else None
        return Arrangement(divided, parallel, engines, fit=fit, refusal=refusal, sent_bytes=sent, speed=speed)

    arrangements = [arrange(pool, options)]
    on_gpus = device.device_type != "cpu"
    for divided in divisions_of(options, device.count, config) if on_gpus else ():
        if divided.pipeline_parallel == 1 or not any(each.fits for each in arrangements):
            arrangements.append(arrange(pool, divided))
    fits_machine = any(each.fits for each in arrangements)
    for size, experts in stage_divisions(device, config):
        per_machine = device.count // size
        divided = replace(options, tensor_parallel=size, expert_parallel=experts)
        for stages in range(per_machine + 1, pool.machines * per_machine + 1):
            if any(each.fits for each in arrangements):
                break
            arrangements.append(arrange(pool, replace(divided, pipeline_parallel=stages)))
            if arrangements[-1].fit is None:
                break
        else:
            if device.count % size == 0:  # smaller stages use the same devices
                break
    if requested not in [replace(each.options, workers=()) for each in arrangements]:
        arrangements.append(arrange(pool, requested))
    needed = None
    if not fits_machine and (larger := fit_on_larger_machine(header, config, device, options, name=name)):
        machine = Pool(replace(device, count=larger.processes), 1, pool.link)
        needed = arrange(machine, larger)
    return Advice(pool, tuple(arrangements), describe_rates(rates, pool), needed)


def stage_divisions(device: DeviceSpec, config: ModelConfig) -> list[tuple[int, bool]]:
    """Return how many devices of a machine divide a stage, and whether by whole experts, in the order of
    preference."""
    sizes = [] if device.device_type == "cpu" else powers_of_2(device.count)[::-1]
    return [
        (size, experts)
        for size in [*sizes, 1]
        for experts in (False, True)[: 1 + bool(size > 1 and config.mixtures)]
    ]


def assumed_rates(device: DeviceSpec, config: ModelConfig) -> Expectation:
    """Return the rates that steps are assumed to reach on a device that was not measured."""
    step_s = ASSUMED_LAYER_S * len(config.layers)
    known = "measured" if device.measured else "published"
    source = (
        f"{ASSUMED_BANDWIDTH_SHARE:.0%} of the {known} bandwidth, {ASSUMED_FLOPS_SHARE:.0%} of the arithmetic "
        f"rate and {step_s * 1e6:.0f} µs more a step: assumed, no step was measured"
    )
    bandwidth, flops = device.bandwidth * ASSUMED_BANDWIDTH_SHARE, device.flops * ASSUMED_FLOPS_SHARE
    return Expectation(bandwidth, flops, step_s, source)


def describe_rates(rates: Expectation, pool: Pool) -> str:
    """Return where durations come from, with the links that the pool uses."""
    links = {"devices": (pool.link or default_link(pool.device)) if pool.device.count > 1 else None}
    links["machines"] = pool.network if pool.machines > 1 else None
    named = [
        f"between {ends} {link.bandwidth / 1e9:g} GB/s and {link.latency_s * 1e6:g} µs"
        for ends, link in links.items()
        if link
    ]
    return "; ".join([rates.source, *named])

"""Turns the flags of `localllm simulate` into a simulation: a model on a device, a load, objectives. Refuses flags
that have no effect.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.checkpoint.header import Header
from localllm.cli.io import flag_name, note, status
from localllm.cli.loading import free_memory, parse_load_options
from localllm.errors import UsageError
from localllm.formatting import parse_duration
from localllm.hardware.catalog import DeviceSpec, find_device
from localllm.hardware.prices import RentalPrice, find_price
from localllm.plan.fit import LoadOptions
from localllm.plan.weights import check_quant
from localllm.routing import ROUTES, parse_replicas
from localllm.settings import Settings

if TYPE_CHECKING:  # they import torch, which takes a second that no refusal needs
    from localllm.plan.parallel import Parallel
    from localllm.simulate.capacity import Objective, Variant
    from localllm.simulate.fleet import FleetSetup
    from localllm.simulate.load import LoadPlan
    from localllm.simulate.report import Report
    from localllm.simulate.simulation import Observer
    from localllm.simulate.target import Target
    from localllm.simulate.tiers import TierSetup

LOCAL_DEVICES = ("auto", "cpu", "cuda")
BATCHING = ("continuous", "dynamic", "static")
ORDERS = ("fcfs", "shortest")
DEFAULT_POLICIES = {"batching": "continuous", "order": "fcfs"}
# Flags that `--check` refuses, why, and what to do; every other one describes the load or the server.
NOT_REPLAYED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("slo", "attainment", "sensitivity", "plot", "gantt", "price", "prices", "watts"),
        "it compares latencies and throughput alone",
        "leave it out, or simulate without --check",
    ),
    (
        ("replicas", "route", "start_up", "scale_target", "kill", "prefill", "decode"),
        "the load is sent to one server, which is one engine",
        "check a single replica with its share of the load",
    ),
    (
        ("batching", "batch_size", "max_wait", "order", "no_admission", "no_prefix_cache"),
        "a server has no such policy",
        "leave it out",
    ),
    (("turns",), "conversations cannot be sent", "leave it out, or send them as a --trace"),
    (("max_answer",), "requests are sent with their own lengths as limits", "leave it out"),
    (("ui", "port"), "the page shows simulations alone", "use one of --ui and --check"),
)
COUNTS = (
    *("tensor_parallel", "pipeline_parallel", "prefill", "decode", "cache_tokens"),
    *("chunk", "max_running", "batch_size", "max_answer", "drafts"),
)
DEFAULT_ACCEPTANCE = 0.7
OBJECTIVES = ("queue", "ttft", "tpot", "e2e")


@dataclass(frozen=True)
class PreparedSimulation:
    """A simulation that has not run: its flags checked and translated."""

    target: "Target"
    load: "LoadPlan"
    trace_format: str | None
    objective: "Objective | None"
    sensitivity: bool
    price: RentalPrice | None
    variants: "list[list[Variant]]"  # settings to try where the load is not served, as in `find_requirement`


def prepare_simulation(flags: Mapping[str, Any]) -> PreparedSimulation:
    """Translate the flags of a command line, by the names of the parameters. Raises UsageError for what makes no
    sense, DoesNotFit, and as `read_or_fetch_header`."""
    settings = Settings.from_environment()
    check_flags(flags)
    load_flags = {name: flags[name] for name in ("context", "quant", "dtype", "kv_dtype")}
    load_options = parse_load_options(settings, **load_flags)
    objective = parse_objective(flags)
    trace_format, load_fields = parse_load(flags)
    name, header, gpu, device = find_model(flags["model"], load_options, flags["device"], settings)

    def make_target(options: LoadOptions, first: "Target | None" = None) -> "Target":
        """first: whose durations the target's are compared with"""
        target = target_of(
            name,
            header,
            options,
            gpu,
            device,
            settings,
            typed=flags["model"],
            efficiency=flags["efficiency"],
            division=parse_division(flags) if gpu else None,
            drafts=bool(flags["drafts"]),
            by_steps=first is None,
            machine=first and first.machine,
        )
        return configure(target, flags)

    target, cache_tokens = make_target(load_options), flags["cache_tokens"]
    load = make_load(load_fields, target, cache_tokens)
    price = choose_price(target.device_model or target.device, flags["price"], flags["prices"])
    variants: list[list[Variant]] = []
    if objective:
        from localllm.simulate.capacity import policy_variants

        formats = setting_variants(load_options, header, gpu, target, make_target)
        variants = [[*policy_variants(load, target)], *formats]
    return PreparedSimulation(target, load, trace_format, objective, flags["sensitivity"], price, variants)


def parse_division(flags: Mapping[str, Any]) -> "Parallel":
    """Return the GPUs that compute a replica together; without a link if that of the GPU is meant."""
    from localllm.plan.parallel import Parallel, parse_link

    return Parallel(
        flags["tensor_parallel"] or 1,
        flags["pipeline_parallel"] or 1,
        parse_link(flags["link"]) if flags["link"] else None,
        whole_experts=flags["expert_parallel"],
    )


def parse_objective(flags: Mapping[str, Any]) -> "Objective | None":
    """Return the objectives that flags state, None if they state none."""
    from localllm.simulate.capacity import DEFAULT_ATTAINMENT, Objective

    if not flags["slo"]:
        if flags["sensitivity"]:
            raise UsageError("--sensitivity needs objectives", "give --slo")
        return None
    attainment = DEFAULT_ATTAINMENT if flags["attainment"] is None else flags["attainment"]
    if not 0 < attainment <= 1:
        raise UsageError(f"--attainment is {attainment:g}", "give a share from 0 to 1")
    return Objective(parse_objectives(flags["slo"]), attainment)


def parse_load(flags: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the format of a trace, None without one, and the fields of `LoadPlan` that flags state."""
    from localllm.simulate.load import Lengths
    from localllm.simulate.traces import read_trace

    trace_format, turns = read_trace(flags["trace"]) if flags["trace"] else (None, ())
    fields: dict[str, Any] = {
        **{name: flags[name] for name in ("rate", "users", "burstiness", "turns", "system", "speed", "seed")},
        "trace": turns,
        "requests": flags["requests"] if flags["requests"] is not None else len(turns) or None,
        "think_s": None if flags["think"] is None else parse_duration(flags["think"]),
        **{name: flags[name] and Lengths.parse(flags[name], f"--{name}") for name in ("prompt", "output")},
    }
    return trace_format, {name: value for name, value in fields.items() if value is not None}


def make_load(fields: Mapping[str, Any], target: "Target", cache_tokens: int | None) -> "LoadPlan":
    """Return a load whose requests fit a target. fields: as from `parse_load`"""
    from localllm.simulate.load import LoadPlan

    setup = target.setup
    max_len = setup.capacity if cache_tokens is None else min(setup.context, cache_tokens)
    return LoadPlan(max_len=max_len, **default_lengths(setup.context) | dict(fields))


def configure(target: "Target", flags: Mapping[str, Any]) -> "Target":
    """Return a target whose engine and replicas are as flags say."""
    drafts, cache_tokens, max_wait = flags["drafts"], flags["cache_tokens"], flags["max_wait"]
    acceptance = DEFAULT_ACCEPTANCE if flags["acceptance"] is None else flags["acceptance"]
    changes: dict[str, Any] = {
        "token_budget": flags["chunk"],
        "max_running": flags["max_running"],
        "blocks": cache_tokens and -(-cache_tokens // target.setup.block_size),
        "batch_size": flags["batch_size"],
        "max_wait_s": None if max_wait is None else parse_duration(max_wait),
        "max_answer": flags["max_answer"],
        "drafts": drafts,
        "acceptance": acceptance if drafts else None,
    }
    setup = replace(
        target.setup,
        batching=flags["batching"],
        order=flags["order"],
        admission=not flags["no_admission"],
        prefix_caching=not flags["no_prefix_cache"],
        seed=flags["seed"],
        **{name: value for name, value in changes.items() if value is not None},
    )
    fleet = fleet_setup(flags, setup.max_running, target)
    setup = replace(setup, fleet=fleet, tiers=tier_setup(flags, target))
    return replace(target, setup=setup, watts=target.watts if flags["watts"] is None else flags["watts"])


def setting_variants(
    load_options: LoadOptions,
    header: Header,
    gpu: str | None,
    target: "Target",
    make_target: "Callable[[LoadOptions, Target], Target]",
) -> "list[list[Variant]]":
    """Return other formats of weights, or of keys and values, to try, and then both together.

    There are none where step times are those of measured steps, which are of the present formats.
    """
    from localllm.simulate.serving import serving_settings

    if target.rates is None:
        return []
    can_quantize = load_options.quant is None and not header.quantization
    device = find_device(gpu) if gpu else None
    single: list[Variant] = []
    both: list[Variant] = []
    for flags, changed in serving_settings(load_options, device, can_quantize=can_quantize)[1:]:
        several = changed.quant != load_options.quant and changed.kv_dtype != load_options.kv_dtype
        (both if several else single).append((flags, partial(make_target, changed, target)))
    return [single, both]


def run_prepared(
    simulation: PreparedSimulation, show_status: Callable[[str], None], observer: "Observer | None" = None
) -> "Report":
    """Run a simulation and the searches that were requested, and return the report.

    observer: sees the first run
    """
    from localllm.simulate.capacity import find_capacity, find_requirement, sensitivities
    from localllm.simulate.report import Report
    from localllm.simulate.simulation import simulate as run_simulation

    target, load, objective = simulation.target, simulation.load, simulation.objective
    cost = target.cost
    simulated = run_simulation(load, target.setup, cost, observer=observer)
    capacity = find_capacity(load, objective, target, show_status) if objective else None
    requirement = None
    if objective and capacity:
        requirement = find_requirement(load, objective, target, capacity, simulation.variants, show_status)
    changed = []
    if simulation.sensitivity and objective and capacity and capacity.simulated:
        changed = sensitivities(load, objective, target, capacity, show_status)
    return Report(
        target,
        load,
        simulation.trace_format,
        cost,
        simulated,
        objective,
        capacity,
        requirement,
        changed,
        simulation.price,
    )


def fleet_setup(flags: Mapping[str, Any], max_running: int, target: "Target") -> "FleetSetup":
    """Return the replicas that the flags request."""
    from localllm.simulate.fleet import FleetSetup, parse_kills

    prefill, decode = flags["prefill"], flags["decode"]
    first, most = parse_replicas(flags["replicas"] or "1")
    if (prefill is None) != (decode is None):
        raise UsageError("--prefill and --decode go together", "give the number of replicas of each")
    if prefill:
        refuse_flags(flags, ("replicas",), "has no effect beside --prefill and --decode")
        if target.link is None:
            raise UsageError("--prefill is for GPUs of the catalogue", "name one with --device")
        first = most = prefill + decode
    if most == first:
        refuse_flags(flags, ("scale_target",), "needs a range of --replicas")
    if most == first == 1:
        refuse_flags(flags, ("route",), "needs --replicas")
    if most == first and not flags["kill"]:
        refuse_flags(flags, ("start_up",), "needs a range of --replicas, or --kill")
    if (target_count := flags["scale_target"]) is not None and not 0 < target_count < math.inf:
        raise UsageError(f"--scale-target is {target_count:g}", "give a number above 0")
    return FleetSetup(
        replicas=first,
        most_replicas=most,
        route=flags["route"] or "load",
        scale_target=target_count or max_running / 2,
        start_s=parse_duration(flags["start_up"]) if flags["start_up"] else 0.0,
        kills=parse_kills(flags["kill"], most) if flags["kill"] else (),
        prefill=prefill or 0,
        link=target.link,
        token_bytes=target.token_bytes,
    )


def tier_setup(flags: Mapping[str, Any], target: "Target") -> "TierSetup":
    """Return the tiers below the device's blocks that the flags request. Raises UsageError."""
    from localllm.simulate.tiers import ASSUMED_HOST_BANDWIDTH, NO_TIERS, TierSetup, parse_tier

    host, disk = flags["host_cache"], flags["disk_cache"]
    if host is None and disk is None:
        return NO_TIERS
    if flags["no_prefix_cache"]:
        raise UsageError("--host-cache and --disk-cache hold the prefix cache", "leave out --no-prefix-cache")
    if not target.setup.asynchronous and host:
        raise UsageError("--host-cache is for GPUs: the cache of a CPU is in main memory", "use --cache-tokens")
    if target.setup.state_slots:
        raise UsageError(
            "cache tiers are simulated only for models without recurrent layers", "leave them out for this model"
        )
    block_bytes = target.token_bytes * target.setup.block_size
    tiers = TierSetup(
        host_bandwidth=ASSUMED_HOST_BANDWIDTH * target.devices if target.setup.asynchronous else 0.0,
        block_bytes=block_bytes,
    )
    if host:
        size, bandwidth = parse_tier(host, "--host-cache", ASSUMED_HOST_BANDWIDTH)
        tiers = replace(tiers, host_blocks=int(size // block_bytes), host_bandwidth=bandwidth * target.devices)
    if disk:
        size, bandwidth = parse_tier(disk, "--disk-cache", tiers.disk_bandwidth)
        tiers = replace(tiers, disk_blocks=int(size // block_bytes), disk_bandwidth=bandwidth)
    return tiers


def choose_price(device: str, price: float | None, file: Path | None) -> RentalPrice | None:
    """Return the price of a device: the given one, or that of a file of prices.

    Raises UsageError for a file without it.
    """
    if price is not None:
        return RentalPrice(price)
    found = find_price(device, file)
    if file and not found:
        raise UsageError(f"{file} has no price of {device}", "add it, or give --price")
    return found


def default_lengths(context: int) -> dict[str, Any]:
    """Return lengths that a context has room for, with their spread."""
    from localllm.simulate.load import Lengths

    return {
        "prompt": Lengths(max(1, min(512, context // 4)), 0.8),
        "output": Lengths(max(1, min(128, context // 8)), 0.6),
    }


def find_model(
    model: str, load_options: LoadOptions, device: str | None, settings: Settings
) -> tuple[str, Header, str | None, str]:
    """Return name and header of a model, the GPU of the catalogue that it is simulated on, None for this machine,
    and the device."""
    from localllm.cli.plan import read_or_fetch_header

    local = (device or settings.device).partition(":")[0] in LOCAL_DEVICES
    gpu = None if local else device
    chosen = device or settings.device
    name, header = read_or_fetch_header(model, load_options, gpu, chosen)
    return name, header, gpu, chosen


def recording_command(typed: str, load_options: LoadOptions, *, drafts: bool) -> str:
    """Return a command that records steps to which durations can be fitted. typed: the model as typed"""
    words = ["localllm", "bench", shlex.quote(typed)]
    words += ["--quant", load_options.quant] if load_options.quant else []
    words += ["--dtype", load_options.dtype] if load_options.dtype != "auto" else []
    words += ["--kv-dtype", load_options.kv_dtype] if load_options.kv_dtype != "auto" else []
    words += ["--draft"] if drafts else []
    return " ".join([*words, "--prompt", "64,512", "--batch", "1,8,32"])


def target_of(
    name: str,
    header: Header,
    load_options: LoadOptions,
    gpu: str | None,
    chosen: str,
    settings: Settings,
    *,
    typed: str,
    efficiency: str | None = None,
    division: "Parallel | None" = None,
    drafts: bool = False,
    by_steps: bool = True,
    machine: DeviceSpec | None = None,
) -> "Target":
    """Return a model on GPUs of the catalogue, or on a device of this machine.

    chosen: the device of this machine; typed: the model as typed; division: the GPUs that compute it together,
    whose link is the GPU's own if they have none; drafts: whether sequences have any; by_steps: use a fit to
    recorded steps if there is one, otherwise the roofline in any case; machine: the device, if it was measured
    """
    from localllm.plan.parallel import default_link
    from localllm.plan.speed import ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE
    from localllm.simulate.target import (
        CPU_SEQUENCE_S,
        ONE_DEVICE,
        RecordedFit,
        fit_recorded,
        fitted_target,
        parse_shares,
        roofline_target,
    )

    if gpu:
        shares = parse_shares(efficiency) if efficiency else (ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE)
        spec = find_device(gpu)
        gpus = division or ONE_DEVICE
        gpus = replace(gpus, link=gpus.link or default_link(spec))
        return roofline_target(header, spec, load_options, name=name, shares=shares, parallel=gpus)
    from localllm.plan.expected import expect_on_device, step_setup

    memory = free_memory(chosen)
    setup, device_name = step_setup(header, load_options, chosen, settings, name=name)
    fitted = fit_recorded(settings.home, setup, note, name=name, drafts=drafts)
    if isinstance(fitted, RecordedFit) and by_steps:
        return fitted_target(header, memory, load_options, fitted, name=name, device_name=device_name)
    with status(f"measuring this machine for {name}"):
        hardware, expectation = expect_on_device(
            header, load_options, chosen, settings, name=name, note=note, by_answers=False, hardware=machine
        )
    if isinstance(fitted, RecordedFit):
        reason = "recorded steps are not used, because other settings have none"
    else:
        command = recording_command(typed, load_options, drafts=drafts)
        reason = f"{fitted} (`{command}` records what a fit needs)"
    if expectation is None:
        target = roofline_target(header, hardware, load_options, name=name, reason=reason)
        return replace(target, machine=hardware)
    reached = replace(hardware, bandwidth=expectation.bandwidth, flops=expectation.flops)
    source = f"roofline of this machine, from {expectation.source}; {reason}"
    target = roofline_target(
        header,
        reached,
        load_options,
        name=name,
        shares=(1.0, 1.0),
        step_s=expectation.step_s,
        sequence_s=CPU_SEQUENCE_S if hardware.device_type == "cpu" else 0.0,
        source=source,
    )
    return replace(target, machine=hardware)


def parse_objectives(text: str) -> dict[str, float]:
    """Seconds by measure. Raises UsageError."""
    from localllm.benchmark.load.outcome import LatencyObjective

    limits = LatencyObjective.parse(text).limits
    if unknown := limits.keys() - set(OBJECTIVES):
        raise UsageError(
            f"--slo has {', '.join(unknown)}", "simulations support the objectives ttft, tpot and e2e"
        )
    return limits


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise UsageError for a value that no model makes possible, and for a flag that would have no effect."""
    check_quant(flags["quant"])
    check_choices(
        batching=(flags["batching"], BATCHING),
        order=(flags["order"], ORDERS),
        route=(flags["route"] or "load", ROUTES),
    )
    if flags["device"] in (None, *LOCAL_DEVICES):
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "link", "efficiency"):
            if flags[name] not in (None, False):
                raise UsageError(f"{flag_name(name)} is for GPUs of the catalogue", "name one with --device")
    for name in COUNTS:
        if flags[name] is not None and flags[name] < 1:
            raise UsageError(f"{flag_name(name)} is {flags[name]}", "give a whole number from 1")
    if all(flags[name] is None for name in ("tensor_parallel", "pipeline_parallel", "prefill")):
        refuse_flags(flags, ("link",), "needs --tensor-parallel, --pipeline-parallel or --prefill")
    if flags["tensor_parallel"] in (None, 1):
        refuse_flags(flags, ("expert_parallel",), "divides experts among the GPUs of --tensor-parallel")
    check_combinations(flags)


def check_combinations(flags: Mapping[str, Any]) -> None:
    """Raise UsageError for a flag that would have no effect."""
    useless = (
        ("trace", ("prompt", "output", "system", "turns", "burstiness", "think"), "a trace has its own requests"),
        ("users", ("burstiness",), "users send at their own times"),
        ("price", ("prices",), "--price is the price"),
    )
    for given, others, reason in useless:
        if flags[given] is not None:
            refuse_flags(flags, others, f"has no effect, because {reason}")
    needed = (
        (flags["trace"] is not None, ("speed",), "--trace"),
        (flags["slo"] is not None, ("attainment",), "--slo"),
        (flags["drafts"] is not None, ("acceptance",), "--drafts"),
        (flags["batching"] != "continuous", ("batch_size",), "--batching static or dynamic"),
        (flags["batching"] == "dynamic", ("max_wait",), "--batching dynamic"),
        (flags["rate"] is None or flags["turns"] is not None, ("think",), "--users or --turns"),
    )
    for is_given, others, required in needed:
        if not is_given:
            refuse_flags(flags, others, f"needs {required}")
    if not 0 <= (flags["acceptance"] or 0) <= 1:
        raise UsageError(f"--acceptance is {flags['acceptance']:g}", "give a probability from 0 to 1")
    for name in ("price", "watts"):
        if flags[name] is not None and not 0 < flags[name] < math.inf:
            raise UsageError(f"--{name} is {flags[name]:g}", "give a number above 0")


def check_replayable(flags: Mapping[str, Any]) -> None:
    """Raise UsageError for a flag that `--check` cannot send to a server, or that would have no effect."""
    for names, reason, remedy in NOT_REPLAYED:
        for name in names:
            if flags[name] not in (None, False, DEFAULT_POLICIES.get(name)):
                raise UsageError(f"{flag_name(name)} cannot be checked: {reason}", remedy)


def refuse_flags(flags: Mapping[str, Any], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if flags[name] not in (None, False):
            raise UsageError(f"{flag_name(name)} {reason}", "leave it out")


def check_choices(**chosen: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in chosen.items():
        if value not in choices:
            raise UsageError(f"--{name} is {value!r}", f"give {', '.join(choices[:-1])} or {choices[-1]}")

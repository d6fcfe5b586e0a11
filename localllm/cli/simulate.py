"""`localllm simulate`: how a model would serve a load on this machine or a GPU, without computing anything."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.checkpoint.header import Header
from localllm.cli import options
from localllm.cli.io import StdoutWriter, flag_name, note, status
from localllm.cli.progress import status_line
from localllm.errors import UsageError
from localllm.formatting import parse_duration
from localllm.hardware.catalog import find_device
from localllm.hardware.prices import RentalPrice, find_price
from localllm.plan.fit import LoadOptions
from localllm.plan.weights import check_quant
from localllm.routing import ROUTES, parse_replicas
from localllm.settings import Settings

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
TERMINAL = "-"  # instead of a file
PAGE_WIDTH = 80
OBJECTIVES = ("queue", "ttft", "tpot", "e2e")


def simulate(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    device: Annotated[
        str | None,
        options.option(
            "--device",
            text="GPU of the catalogue, such as h100, or auto, cpu or cuda for this machine; default: auto.",
            metavar="NAME",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        options.option("--rate", text="Requests per second, independent of completions.", metavar="R"),
    ] = None,
    users: Annotated[
        int | None,
        options.option("--users", text="Users who each wait for an answer before the next request.", metavar="N"),
    ] = None,
    trace: Annotated[
        Path | None,
        options.option(
            "--trace",
            text="Trace of requests: BurstGPT, Azure LLM, Mooncake, or a JSON log of serve.",
            metavar="FILE",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        options.option(
            "--slo",
            text="Objectives, such as ttft=500ms,tpot=50ms: also finds the highest load within them.",
            metavar="NAME=TIME,...",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        options.option("--requests", text="Number of requests; default: 1000, or the trace's.", metavar="N"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the load.", metavar="N")] = 0,
    prompt: Annotated[
        str | None,
        options.option(
            "--prompt",
            text="Prompt length in tokens, or median and spread; default: 512~0.8, or a quarter of the context.",
            metavar="N[~S]",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    output: Annotated[
        str | None,
        options.option(
            "--output",
            text="Answer length in tokens, or median and spread; default: 128~0.6, or an eighth of the context.",
            metavar="N[~S]",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float | None,
        options.option(
            "--burstiness",
            text="Squared variation of the gaps between arrivals; default: 1, which is Poisson.",
            metavar="X",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    think: Annotated[
        str | None,
        options.option(
            "--think",
            text="Mean time between an answer and the next request of its user; default: 0.",
            metavar="TIME",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    turns: Annotated[
        int | None,
        options.option(
            "--turns",
            text="Requests of a conversation, each with all before it; default: 1.",
            metavar="N",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    system: Annotated[
        int | None,
        options.option(
            "--system",
            text="Length of a system prompt that all requests share, in tokens.",
            metavar="N",
            panel=options.Panel.LOAD,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        options.option("--speed", text="Speed of the trace; default: 1.", metavar="X", panel=options.Panel.LOAD),
    ] = None,
    context: options.Context = None,
    quant: Annotated[str | None, options.assumed_quant(options.Panel.LOADING)] = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    chunk: Annotated[
        int | None,
        options.option(
            "--chunk",
            text="Most tokens of a step; default: as the engine.",
            metavar="TOKENS",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        options.option(
            "--max-running",
            text="Most requests that run at once; default: as the engine.",
            metavar="N",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        options.option(
            "--cache-tokens",
            text="Size of the KV cache; default: as the engine.",
            metavar="TOKENS",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    host_cache: Annotated[
        str | None,
        options.option(
            "--host-cache",
            text="Main memory for evicted blocks of a GPU, and the bandwidth of its link; default: none.",
            metavar="SIZE[,B]",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    disk_cache: Annotated[
        str | None,
        options.option(
            "--disk-cache",
            text="Disk for blocks that leave memory, as with --cache-dir, and its bandwidth; default: none.",
            metavar="SIZE[,B]",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    batching: Annotated[
        str,
        options.option(
            "--batching",
            text="Batching: continuous, dynamic or static; default: continuous.",
            metavar="NAME",
            panel=options.Panel.ENGINE,
            choices=BATCHING,
        ),
    ] = "continuous",
    batch_size: Annotated[
        int | None,
        options.option(
            "--batch-size",
            text="Requests of a static or dynamic batch; default: 8.",
            metavar="N",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    max_wait: Annotated[
        str | None,
        options.option(
            "--max-wait",
            text="Longest that a dynamic batch waits to be full; default: 0.1s.",
            metavar="TIME",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    order: Annotated[
        str,
        options.option(
            "--order",
            text="Order of the queue: fcfs or shortest; default: fcfs.",
            metavar="NAME",
            panel=options.Panel.ENGINE,
            choices=ORDERS,
        ),
    ] = "fcfs",
    no_admission: Annotated[
        bool,
        options.switch(
            "--no-admission",
            text="Start requests without reserving blocks for their answers.",
            panel=options.Panel.ENGINE,
        ),
    ] = False,
    no_prefix_cache: Annotated[
        bool,
        options.switch(
            "--no-prefix-cache",
            text="Compute every prompt as a whole.",
            panel=options.Panel.ENGINE,
        ),
    ] = False,
    max_answer: Annotated[
        int | None,
        options.option(
            "--max-answer",
            text="Limit that requests state for their answers; default: the answer's length.",
            metavar="TOKENS",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        options.option(
            "--replicas",
            text="Engines that share the load, or a range between which they are scaled; default: 1.",
            metavar="N[..M]",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    route: Annotated[
        str | None,
        options.option(
            "--route",
            text="Choice of a replica: round-robin, load or prefix; default: load.",
            metavar="NAME",
            panel=options.Panel.FLEET,
            choices=ROUTES,
        ),
    ] = None,
    start_up: Annotated[
        str | None,
        options.option(
            "--start-up",
            text="Time until a new or failed replica takes requests; default: 0.",
            metavar="TIME",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    scale_target: Annotated[
        float | None,
        options.option(
            "--scale-target",
            text="With a range: requests per replica to aim at; default: half of --max-running.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    kill: Annotated[
        str | None,
        options.option(
            "--kill",
            text="Replicas that fail, and when, such as 1@60s.",
            metavar="N@TIME,...",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        options.option(
            "--prefill",
            text="Replicas that compute prompts alone, beside those of --decode.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    decode: Annotated[
        int | None,
        options.option(
            "--decode",
            text="Replicas that compute answers alone.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        options.option(
            "--tensor-parallel",
            text="GPUs that share every layer of a replica; default: 1.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        options.option(
            "--pipeline-parallel",
            text="Stages of layers, each on a GPU of its own; default: 1.",
            metavar="N",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    link: Annotated[
        str | None,
        options.option(
            "--link",
            text="Link between GPUs and replicas: bandwidth in one direction and latency; default: of the GPU.",
            metavar="B[,L]",
            panel=options.Panel.FLEET,
        ),
    ] = None,
    drafts: Annotated[
        int | None,
        options.option(
            "--drafts",
            text="Draft tokens of each sequence and step; default: 0.",
            metavar="N",
            panel=options.Panel.SPECULATION,
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        options.option(
            "--acceptance",
            text="Probability that a draft token is accepted; default: 0.7.",
            metavar="P",
            panel=options.Panel.SPECULATION,
        ),
    ] = None,
    efficiency: Annotated[
        str | None,
        options.option(
            "--efficiency",
            text="Shares of published bandwidth and arithmetic that steps reach; default: 0.7,0.55.",
            metavar="B[,F]",
            panel=options.Panel.ENGINE,
        ),
    ] = None,
    attainment: Annotated[
        float | None,
        options.option(
            "--attainment",
            text="Share of requests that must meet the objectives; default: 0.95.",
            metavar="P",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        options.switch(
            "--sensitivity",
            text="With --slo: show how the highest load changes with each assumption.",
            panel=options.Panel.OUTPUT,
        ),
    ] = False,
    price: Annotated[
        float | None,
        options.option(
            "--price",
            text="Price of the device per hour; default: a dated list price of the GPU, if there is one.",
            metavar="X",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        options.option(
            "--prices",
            text="File of prices by device, instead of the list prices that localllm ships.",
            metavar="FILE",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    watts: Annotated[
        float | None,
        options.option(
            "--watts",
            text="Power of the device, for the energy of tokens; default: the GPU's maximum.",
            metavar="W",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        options.option(
            "--plot", text="Plot the simulation to a PNG or SVG file.", metavar="FILE", panel=options.Panel.OUTPUT
        ),
    ] = None,
    gantt: Annotated[
        str | None,
        options.option(
            "--gantt",
            text="Draw requests as lanes over time to a PNG or SVG file, or with - below the report.",
            metavar="FILE",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    check: Annotated[
        str | None,
        options.option(
            "--check",
            text="Send the load to this running server too, and show the error of every figure.",
            metavar="URL",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    ui: Annotated[
        bool,
        options.switch(
            "--ui",
            text="Open a page to play with: sliders, and requests that move through the engine.",
            panel=options.Panel.OUTPUT,
        ),
    ] = False,
    port: Annotated[
        int | None,
        options.option(
            "--port",
            text="Port of --ui on this machine; default: a free one.",
            metavar="N",
            panel=options.Panel.OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Simulate how a model would serve a load.

    It runs on this machine, or on a GPU that is not here. MODEL is a name of `localllm list --all`, ORG/REPO, or
    the path of a folder or a GGUF file. The engine and its scheduler are those of `serve`, but steps compute
    nothing: on this machine they take what measured steps took, elsewhere what the roofline says. Give one of
    --rate, --users and --trace. docs/simulate.md explains every number. --ui opens a page instead, with the other
    options filled in, until Ctrl-C; it needs no MODEL. Exits with code 3 if the model does not fit.
    """
    out = StdoutWriter()
    flags = ctx.params | {"trace": trace, "plot": plot, "prices": prices}
    if check is not None:
        check_replayable(flags)
    if ui:
        from localllm.cli.simulate_page import open_page

        open_page(model, flags, port, out)
        return
    if port is not None:
        raise UsageError("--port needs --ui", "leave it out")
    if model is None:
        raise UsageError("no model is named", "name one of `localllm list --all`, such as demo")
    simulation = prepare_simulation(flags)
    gantt_file = Path(gantt) if gantt and gantt != TERMINAL else None
    for picture in filter(None, (plot, gantt_file)):
        from localllm.benchmark.plot import check_plot

        check_plot(picture)
    if as_json and gantt == TERMINAL:
        raise UsageError("--gantt - has no place in JSON", "name a file for it")
    if check:
        settings = Settings.from_environment()
        run_check(check, simulation.load, simulation.target, settings, out, as_json=as_json)
        return
    from localllm.simulate.report import as_dict, format_report

    with status_line() as show_status:
        report = run_prepared(simulation, show_status)
    if plot:
        from localllm.benchmark.simulation_plot import draw_simulation

        draw_simulation(report, plot)
    out.write(
        (json.dumps(as_dict(report), indent=1, allow_nan=False) if as_json else format_report(report)) + "\n"
    )
    if gantt == TERMINAL:
        from rich.console import Console

        from localllm.benchmark.gantt import format_gantt

        out.write("\n")
        console = Console(highlight=False, width=None if out.terminal else PAGE_WIDTH)
        console.print(format_gantt(report, console.width), end="", no_wrap=True, crop=False)
    elif gantt_file:
        from localllm.benchmark.gantt import draw_gantt

        draw_gantt(report, gantt_file)


@dataclass(frozen=True)
class PreparedSimulation:
    """A simulation that has not run: its flags checked and translated."""

    target: Any
    load: Any
    trace_format: str | None
    objective: Any
    sensitivity: bool
    price: RentalPrice | None
    variants: list[Any]  # settings to try where the load is not served: groups, as in `find_requirement`


def prepare_simulation(flags: Mapping[str, Any]) -> PreparedSimulation:
    """Translate the flags of a command line, by the names of the parameters. Raises UsageError for what makes no
    sense, DoesNotFit, and as `read_or_fetch_header`."""
    settings = Settings.from_environment()
    check_quant(flags["quant"])
    load_options = LoadOptions(
        flags["context"],
        1,
        flags["quant"],
        flags["dtype"] or settings.dtype,
        flags["kv_dtype"] or settings.kv_dtype,
    )
    check_choices(
        batching=(flags["batching"], BATCHING),
        order=(flags["order"], ORDERS),
        route=(flags["route"] or "load", ROUTES),
    )
    device, efficiency, cache_tokens = flags["device"], flags["efficiency"], flags["cache_tokens"]
    parallel_flags = ("tensor_parallel", "pipeline_parallel", "link")
    for name in parallel_flags:
        if flags[name] is not None and device in (None, *LOCAL_DEVICES):
            raise UsageError(f"{flag_name(name)} is for GPUs of the catalogue", "name one with --device")
    for name in ("tensor_parallel", "pipeline_parallel", "prefill", "decode", "cache_tokens"):
        positive(flags[name], flag_name(name))
    if efficiency and device in (None, *LOCAL_DEVICES):
        raise UsageError("--efficiency is for a GPU of the catalogue", "name one with --device, or leave it out")
    if all(flags[name] is None for name in ("tensor_parallel", "pipeline_parallel", "prefill")):
        refuse_flags(flags, ("link",), "needs --tensor-parallel, --pipeline-parallel or --prefill")
    check_combinations(flags)
    from localllm.simulate.capacity import DEFAULT_ATTAINMENT, Objective
    from localllm.simulate.load import Lengths, LoadPlan
    from localllm.simulate.requirement import policy_variants
    from localllm.simulate.traces import read_trace

    trace_format, turns_of_trace = read_trace(flags["trace"]) if flags["trace"] else (None, ())
    given: dict[str, Any] = {
        **{name: flags[name] for name in ("rate", "users", "burstiness", "turns", "system", "speed")},
        "requests": flags["requests"] if flags["requests"] is not None else len(turns_of_trace) or None,
        "think_s": None if flags["think"] is None else parse_duration(flags["think"]),
        "prompt": flags["prompt"] and Lengths.parse(flags["prompt"], "--prompt"),
        "output": flags["output"] and Lengths.parse(flags["output"], "--output"),
    }
    name, header, gpu, chosen = find_model(flags["model"], load_options, device, settings)

    def unconfigured(changed: LoadOptions) -> Any:
        parallel = (flags["tensor_parallel"] or 1, flags["pipeline_parallel"] or 1, flags["link"])
        return target_of(name, header, changed, gpu, chosen, settings, efficiency, parallel)

    target = unconfigured(load_options)
    own_lengths = default_lengths(target.setup.context)
    load = LoadPlan(
        trace=turns_of_trace,
        seed=flags["seed"],
        max_len=target.setup.capacity if cache_tokens is None else min(target.setup.context, cache_tokens),
        **own_lengths | {name: value for name, value in given.items() if value is not None},
    )
    objective, attainment = None, flags["attainment"]
    if flags["slo"]:
        objective = Objective(
            parse_objectives(flags["slo"]), DEFAULT_ATTAINMENT if attainment is None else attainment
        )
        if not 0 < objective.attainment <= 1:
            raise UsageError(f"--attainment is {objective.attainment:g}", "give a share from 0 to 1")
    elif flags["sensitivity"]:
        raise UsageError("--sensitivity needs objectives", "give --slo")
    drafts, acceptance, max_wait = flags["drafts"], flags["acceptance"], flags["max_wait"]
    changes: dict[str, Any] = {
        "token_budget": positive(flags["chunk"], "--chunk"),
        "max_running": positive(flags["max_running"], "--max-running"),
        "blocks": cache_tokens and -(-cache_tokens // target.setup.block_size),
        "batch_size": positive(flags["batch_size"], "--batch-size"),
        "max_wait_s": None if max_wait is None else parse_duration(max_wait),
        "max_answer": positive(flags["max_answer"], "--max-answer"),
        "drafts": positive(drafts, "--drafts"),
        "acceptance": (0.7 if acceptance is None else acceptance) if drafts else None,
    }

    def configured(target: Any) -> Any:
        setup = replace(
            target.setup,
            batching=flags["batching"],
            order=flags["order"],
            admission=not flags["no_admission"],
            prefix_caching=not flags["no_prefix_cache"],
            seed=flags["seed"],
            **{name: value for name, value in changes.items() if value is not None},
        )
        setup = replace(
            setup, fleet=fleet_setup(flags, setup.max_running, target), tiers=tier_setup(flags, target)
        )
        return replace(target, setup=setup, watts=target.watts if flags["watts"] is None else flags["watts"])

    target = configured(target)
    price = choose_price(target.device_model or target.device, flags["price"], flags["prices"])
    variants = []
    if objective:
        formats = setting_variants(
            load_options, header, gpu, target, lambda changed: configured(unconfigured(changed))
        )
        variants = [[*policy_variants(load, target)], *formats]
    return PreparedSimulation(target, load, trace_format, objective, flags["sensitivity"], price, variants)


def setting_variants(
    load_options: LoadOptions,
    header: Header,
    gpu: str | None,
    target: Any,
    make_target: Callable[[LoadOptions], Any],
) -> list[list[tuple[str, Callable[[], Any]]]]:
    """Return other formats of weights, or of keys and values, to try, and then both together.

    There are none where step times are those of measured steps, which are of the present formats.
    """
    from localllm.simulate.serving import serving_settings

    if target.rates is None:
        return []
    can_quantize = load_options.quant is None and not header.quantization
    device = find_device(gpu) if gpu else None
    single: list[tuple[str, Callable[[], Any]]] = []
    both: list[tuple[str, Callable[[], Any]]] = []
    for flags, changed in serving_settings(load_options, device, can_quantize=can_quantize)[1:]:
        several = changed.quant != load_options.quant and changed.kv_dtype != load_options.kv_dtype
        (both if several else single).append((flags, partial(make_target, changed)))
    return [single, both]


def run_prepared(simulation: PreparedSimulation, show_status: Callable[[str], None], observer: Any = None) -> Any:
    """Run a simulation and the searches that were requested, and return the report.

    observer: sees the first run, as `Observer`
    """
    from localllm.simulate.capacity import find_capacity, sensitivities
    from localllm.simulate.report import Report
    from localllm.simulate.requirement import find_requirement
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


def fleet_setup(flags: Mapping[str, Any], max_running: int, target: Any) -> Any:
    """Return the replicas that flags ask for."""
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


def tier_setup(flags: Mapping[str, Any], target: Any) -> Any:
    """Return the tiers below the device's blocks that flags ask for. Raises UsageError."""
    from localllm.simulate.tiers import ASSUMED_HOST_BANDWIDTH, NO_TIERS, TierSetup, parse_tier

    host, disk = flags["host_cache"], flags["disk_cache"]
    if host is None and disk is None:
        return NO_TIERS
    if flags["no_prefix_cache"]:
        raise UsageError("--host-cache and --disk-cache hold the prefix cache", "leave out --no-prefix-cache")
    if not target.setup.asynchronous and host:
        raise UsageError("--host-cache is for GPUs: the cache of a CPU is in main memory", "use --cache-tokens")
    if target.setup.state_slots:
        raise UsageError("tiers are simulated for layers of attention alone", "leave them out for this model")
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


def run_check(url: str, load: Any, target: Any, settings: Settings, out: StdoutWriter, *, as_json: bool) -> None:
    """Send a load to a server, print predicted and measured figures, and keep them."""
    from localllm.benchmark.load.check import as_dict, check_server, format_check, keep_check
    from localllm.benchmark.load.client import normalize_url

    with status_line() as show_status:
        result, _ = check_server(normalize_url(url), load, target, report=show_status)
    keep_check(settings.home, result, note)
    text = json.dumps(as_dict(result), indent=1, allow_nan=False) if as_json else format_check(result)
    out.write(text + "\n")


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


def target_of(
    name: str,
    header: Header,
    load_options: LoadOptions,
    gpu: str | None,
    chosen: str,
    settings: Settings,
    efficiency: str | None = None,
    parallel: tuple[int, int, str | None] = (1, 1, None),
) -> Any:
    """Return a model on GPUs of the catalogue, or on a device of this machine.

    chosen: the device of this machine; parallel: how many GPUs divide each layer, how many the layers, and their
    link, None for the GPU's own
    """
    from localllm.plan.parallel import Parallel, default_link, parse_link
    from localllm.plan.speed import ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE
    from localllm.simulate.target import (
        CPU_SEQUENCE_S,
        fitted_target,
        measured_steps,
        parse_shares,
        roofline_target,
    )

    if gpu:
        shares = parse_shares(efficiency) if efficiency else (ASSUMED_BANDWIDTH_SHARE, ASSUMED_FLOPS_SHARE)
        spec = find_device(gpu)
        tensor, pipeline, link = parallel
        gpus = Parallel(tensor, pipeline, parse_link(link) if link else default_link(spec))
        return roofline_target(header, spec, load_options, name=name, shares=shares, parallel=gpus)
    from localllm.cli.loading import free_memory
    from localllm.plan.expected import expect_on_device, step_setup

    memory = free_memory(chosen)
    setup, device_name = step_setup(header, load_options, chosen, settings, name=name)
    if steps := measured_steps(settings.home, setup, note):
        origin = f"of {name} on this machine"
        return fitted_target(
            header, memory, load_options, steps, name=name, device_name=device_name, origin=origin
        )
    with status(f"measuring this machine for {name}"):
        hardware, expectation = expect_on_device(
            header, load_options, chosen, settings, name=name, note=note, by_answers=False
        )
    if expectation is None:
        return roofline_target(header, hardware, load_options, name=name)
    reached = replace(hardware, bandwidth=expectation.bandwidth, flops=expectation.flops)
    source = f"roofline of this machine, from {expectation.source}; no step of {name} was measured (see `bench`)"
    return roofline_target(
        header,
        reached,
        load_options,
        name=name,
        shares=(1.0, 1.0),
        step_s=expectation.step_s,
        sequence_s=CPU_SEQUENCE_S if hardware.device_type == "cpu" else 0.0,
        source=source,
    )


def parse_objectives(text: str) -> dict[str, float]:
    """Seconds by measure. Raises UsageError."""
    from localllm.benchmark.load.outcome import LatencyObjective

    limits = LatencyObjective.parse(text).limits
    if unknown := limits.keys() - set(OBJECTIVES):
        raise UsageError(f"--slo has {', '.join(unknown)}", "simulations know the objectives ttft, tpot and e2e")
    return limits


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


def positive(value: int | None, flag: str) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{flag} is {value}", "give a whole number from 1")
    return value


def check_choices(**chosen: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, choices) in chosen.items():
        if value not in choices:
            raise UsageError(f"--{name} is {value!r}", f"give {', '.join(choices[:-1])} or {choices[-1]}")

"""`localllm plan`: whether a model fits this machine or a GPU, and how fast it would run there."""

import json
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.arch.stages import parse_stages
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.published import published_header
from localllm.cli import options
from localllm.cli.io import StdoutWriter, note, status
from localllm.cli.progress import status_line
from localllm.errors import DoesNotFit, UsageError
from localllm.formatting import (
    format_bytes,
    format_columns,
    format_flops,
    format_rate,
    format_seconds,
    format_table,
    parse_duration,
)
from localllm.hardware.catalog import find_devices
from localllm.hub.resolve import missing_repo, resolve_model
from localllm.parallel.handshake import split_addresses
from localllm.plan.advice import ASSUMED_NETWORK, Advice, Arrangement, Pool, advise
from localllm.plan.estimated import Estimate, EstimatedRate
from localllm.plan.expected import expect_on_catalogued, expect_on_device
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import parse_link
from localllm.plan.plan import Choice, Plan
from localllm.plan.plan import plan_model as make_plan
from localllm.plan.speed import Speed
from localllm.plan.weights import GGUF_BITS, QUANTS, check_quant
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.simulate.serving import ServingPlan  # imports torch

DEFAULT_THINK = "20s"
MIN_REQUESTS, ENOUGH_REQUESTS = 300, 1000  # of a simulation, where they are a few of each user
PAGE_WIDTH = 80
VALUE_WIDTH = 62  # columns of values beside the longest label, so that lines have at most 80
BOUND_NAMES = {"memory": "reading memory", "compute": "computing"}
PUBLISHED_NOTE = "a GGUF file, if somebody has published one; --quant makes the others"
CONTEXTS_DIFFER_NOTE = "decoding speed is at each row's own context; --context N makes rows comparable"

Rows = list[tuple[str, str]]


def plan(
    model: options.ModelName,
    gpu: Annotated[
        str | None,
        options.option(
            "--gpu", text="GPU to plan for, such as h100 or 4090; h100:8 for a machine with 8.", metavar="NAME[:N]"
        ),
    ] = None,
    machines: Annotated[
        int, options.option("--machines", text="Number of such machines; default: 1.", metavar="N")
    ] = 1,
    context: Annotated[
        int | None,
        options.option(text="Context length of each user, in tokens: prompt and answer.", metavar="TOKENS"),
    ] = None,
    users: Annotated[int, typer.Option(help="Number of concurrent users.", metavar="N")] = 1,
    prompt: Annotated[
        int | None,
        options.option("--prompt", text="Prompt length for TTFT, in tokens; default: 512.", metavar="TOKENS"),
    ] = None,
    slo: Annotated[
        str | None,
        options.option(
            "--slo",
            text="Objectives, such as ttft=500ms,tpot=50ms: simulate the users, and find settings for them.",
            metavar="NAME=TIME,...",
        ),
    ] = None,
    think: Annotated[
        str | None,
        options.option(
            "--think",
            text="With --slo: mean time between an answer and a user's next request; default: 20s.",
            metavar="TIME",
        ),
    ] = None,
    output: Annotated[
        int | None,
        options.option(
            "--output", text="With --slo: median answer length, in tokens; default: 128.", metavar="TOKENS"
        ),
    ] = None,
    link: Annotated[
        str | None,
        options.option(
            "--link",
            text="Link between GPUs of a machine: bandwidth in one direction and latency; default: of the GPU.",
            metavar="B[,L]",
        ),
    ] = None,
    network: Annotated[
        str | None,
        options.option("--network", text="The same between machines; default: 1.25GB/s,50us.", metavar="B[,L]"),
    ] = None,
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    workers: options.Workers = None,
    token_file: options.TokenFile = None,
    quant: Annotated[str | None, options.assumed_quant(options.Panel.MODEL)] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    as_json: options.Json = False,
) -> None:
    """Estimate whether a model fits, and how fast it would run.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Reads no weights,
    and works for models that are still on the Hub: memory use and speed are computed from the model's metadata,
    for this machine or for a named GPU. Exits with code 3 if the model does not fit.

    With several GPUs or machines, and for a model that does not fit, it compares the ways to use them: replicas,
    --tensor-parallel within a machine, --pipeline-parallel between machines.

    With --slo, --users are people who read, think and ask again, instead of contexts that are full at once: the
    engine is simulated with them, as by `localllm simulate`.
    """
    out = StdoutWriter()
    settings = Settings.from_environment()
    if gpu and device:
        raise UsageError("--gpu plans for another machine, --device for this one", "leave one of them out")
    check_quant(quant)  # before the header is downloaded
    limits, addresses = parse_serving_flags(slo, think, output, users), split_addresses(workers)
    load_options = LoadOptions(
        context,
        1 if slo else users,
        quant,
        dtype or settings.dtype,
        kv_dtype or settings.kv_dtype,
        1 if tensor_parallel is None else tensor_parallel,
        *parse_stages(pipeline_parallel, len(addresses)),
    )
    if addresses and (gpu or machines > 1 or load_options.tensor_parallel > 1):
        flag = "--gpu" if gpu else "--machines" if machines > 1 else "--tensor-parallel"
        raise UsageError(f"--workers plans for this machine and others, not with {flag}", "leave one of them out")
    if slo and load_options.processes > 1:
        raise UsageError("--slo plans for one device", "use `localllm simulate` with --tensor-parallel")
    if machines < 1:
        raise UsageError(f"--machines is {machines}", "give a whole number from 1")
    links = parse_link(link) if link else None, parse_link(network, "--network") if network else ASSUMED_NETWORK
    workers_bytes: tuple[int, ...] = ()
    if addresses:
        from localllm.cli.loading import free_memory_with_workers

        target = device or settings.device
        workers_bytes = free_memory_with_workers(target, addresses, token_file, settings).stage_bytes
    name, header = read_or_fetch_header(model, load_options, gpu, device or settings.device)
    check_quantization(header.config)
    if gpu:
        hardware = find_devices(gpu)
        expectation = expect_on_catalogued(header, load_options, hardware, settings, name=name, note=note)
    else:
        with status(f"measuring this machine for {name}"):
            hardware, expectation = expect_on_device(
                header, load_options, device or "auto", settings, name=name, note=note
            )
    if workers_bytes:
        machines, hardware = len(workers_bytes), replace(hardware, count=1)
    elif load_options.processes > hardware.count * machines:
        hardware = replace(hardware, count=load_options.processes)  # as requested
    pool = Pool(hardware, machines, *links)
    hardware = pool.devices_of(load_options.pipeline_parallel)
    if workers_bytes:
        hardware = replace(hardware, stage_bytes=workers_bytes)
    parallel = pool.divide(load_options.tensor_parallel, load_options.pipeline_parallel)
    result = make_plan(
        header, hardware, load_options, name=name, prompt=prompt, expectation=expectation, parallel=parallel
    )
    advice = None
    if not workers_bytes and (pool.devices > 1 or parallel.devices > 1 or not result.fit.fits):
        advice = advise(header, pool, load_options, name=name, prompt=result.prompt, expectation=expectation)
    serving = None
    if limits:
        lengths = {"prompt": prompt, "output": output}
        think_s = parse_duration(think or DEFAULT_THINK)
        serving = simulate_users(
            name, header, result, load_options, limits, users, think_s, lengths, gpu, device or "auto", settings
        )
    if as_json:
        more = {"advice": advice_json(advice, result), "serving": serving_json(serving)}
        out.write(json.dumps(plan_json(result) | more, indent=1) + "\n")
    else:
        parts = [format_plan(result)]
        parts += [format_advice(advice, result)] if advice else []
        parts += [format_serving(serving)] if serving else []
        out.write("\n\n".join(parts) + "\n")
    if not result.fit.fits:
        raise typer.Exit(DoesNotFit.exit_code)


def parse_serving_flags(slo: str | None, think: str | None, output: int | None, users: int) -> dict[str, float]:
    """Return the limits of `--slo` in seconds, none without it. Raises UsageError for flags that need it."""
    if slo is None:
        for flag, value in (("--think", think), ("--output", output)):
            if value is not None:
                raise UsageError(f"{flag} needs --slo", "add it, or leave it out")
        return {}
    from localllm.cli.simulate import parse_objectives

    if users < 1 or (output is not None and output < 1):
        raise UsageError("--users and --output count from 1", "give whole numbers from 1")
    return parse_objectives(slo)


def simulate_users(
    name: str,
    header: Header,
    plan: Plan,
    load_options: LoadOptions,
    limits: dict[str, float],
    users: int,
    think_s: float,
    lengths: dict[str, int | None],
    gpu: str | None,
    device: str,
    settings: Settings,
) -> "ServingPlan":
    """Simulate users with settings of decreasing quality. lengths: of prompts and answers, None for a default"""
    from localllm.cli.simulate import default_lengths, target_of
    from localllm.simulate.capacity import Objective
    from localllm.simulate.load import Lengths, LoadPlan
    from localllm.simulate.serving import plan_serving, serving_settings
    from localllm.simulate.target import Target

    def make_target(changed: LoadOptions) -> Target:
        return target_of(name, header, changed, gpu, device, settings)

    def make_load(target: Target) -> LoadPlan:
        drawn = default_lengths(target.setup.context)
        drawn |= {which: Lengths(tokens, drawn[which].sigma) for which, tokens in lengths.items() if tokens}
        requests = max(MIN_REQUESTS, min(4 * users, ENOUGH_REQUESTS), 2 * users)
        return LoadPlan(users=users, think_s=think_s, requests=requests, max_len=target.setup.capacity, **drawn)

    can_quantize = load_options.quant is None and not plan.stored_as
    tried = serving_settings(load_options, find_devices(gpu) if gpu else None, can_quantize=can_quantize)
    with status_line() as show_status:
        return plan_serving(tried, make_target, make_load, Objective(limits), show_status)


def format_serving(serving: "ServingPlan") -> str:
    """Table of the settings that were simulated, and a sentence with the answer."""
    from localllm.simulate.report import LABELS, describe_load

    head = ("SETTINGS", "USERS SERVED", f"MET BY {serving.users}", "TTFT p95", "TPOT p95")
    rows = [
        (option.flags or "as planned", "does not fit", "-", "-", "-")
        if option.refusal
        else (
            option.flags or "as planned",
            str(option.capacity),
            "-" if option.met is None else f"{option.met:.0%}",
            "-" if option.ttft_p95_s is None else format_seconds(option.ttft_p95_s),
            "-" if option.tpot_p95_s is None else format_seconds(option.tpot_p95_s),
        )
        for option in serving.options
    ]
    objective = serving.objective
    limits = ", ".join(f"{LABELS[name]} <= {limit * 1e3:g} ms" for name, limit in objective.limits.items())
    promise = f"within {limits} for {objective.attainment:.0%} of the requests"
    choice, best, devices = serving.choice, serving.best, serving.devices
    if choice:
        settings = f" with {choice.flags}" if choice.flags else ""
        answer = f"{serving.users} users are served{settings} {promise}; this device serves {choice.capacity}"
    elif best:
        settings = f" with {best.flags}" if best.flags else ""
        answer = (
            f"this device serves {best.capacity} users{settings} {promise}: {serving.users} need {devices} of it"
        )
    else:
        answer = f"no user is served {promise}"
    source = next((option.step_times for option in serving.options if option.step_times), "")
    lines = [describe_load(serving.load, None), f"step times: {source}", answer]
    return "\n".join([format_table([head, *rows]), *(textwrap.fill(line, PAGE_WIDTH) for line in lines)])


def format_advice(advice: Advice, plan: Plan) -> str:
    """Table of the ways to run the model on several devices, and a sentence with the one to take."""
    head = ("TENSOR", "STAGES", "ENGINES", "WEIGHTS", "CACHE TOKENS", "SENT A TOKEN", "TTFT", "TPOT")
    rows = [head, *(_arrangement_row(each) for each in advice.arrangements)]
    refusals = {each.refusal: None for each in advice.arrangements if each.refusal and each.fit is None}
    lines = [*refusals, f"expected from {advice.source}", advice_sentence(advice, plan)]
    return "\n".join([format_table(rows), *(textwrap.fill(line, PAGE_WIDTH) for line in lines)])


def _arrangement_row(each: Arrangement) -> tuple[str, ...]:
    counts = str(each.parallel.tensor), str(each.parallel.pipeline)
    if each.fit is None or each.speed is None:
        return (*counts, "-", "-", "not divisible", "-", "-", "-")
    return (
        *counts,
        str(each.engines) if each.fits else "-",
        format_bytes(each.fit.weights.total),
        str(each.cached_tokens) if each.fits else "does not fit",
        format_bytes(each.sent_bytes) if each.parallel.devices > 1 else "-",
        format_seconds(each.speed.ttft_s),
        format_seconds(1 / each.speed.tokens_per_s),
    )


def advice_sentence(advice: Advice, plan: Plan) -> str:
    """The way to take, with its command; what would be needed if there is none."""
    chosen, needed = advice.chosen, advice.needed
    name = "machine" if advice.pool.device.device_type == "cpu" else advice.pool.device.name
    command = advised_command(advice, plan)
    if chosen is None:
        sentences = ["it does not fit a machine"]
        if needed:
            sentences.append(f"{needed.parallel.devices} x {name} in one machine would: {command}")
        elif plan.remedy:
            sentences.append(plan.remedy)
        return "; ".join(sentences)
    if chosen.is_spread:
        among = (
            f"{chosen.parallel.pipeline} machines" if name == "machine" else f"{chosen.parallel.devices} x {name}"
        )
        more = f"; or {needed.parallel.devices} x {name} in one machine, with {needed.flags}" if needed else ""
        workers = f"with a worker for each further one: {command}{more}"
        return f"it does not fit one machine, so divide it among {among}, {workers}"
    if chosen.parallel.devices > 1:
        more = f" ({chosen.engines} engines)" if chosen.engines > 1 else ""
        return f"it does not fit one {name}, so divide it within a machine: {command}{more}"
    if chosen.engines == 1:
        return f"it fits one {name}: no second one is needed"
    return f"it fits one {name}, so run an engine on each: {command}"


def advised_command(advice: Advice, plan: Plan) -> str | None:
    """The command that serves the model as advised; None if it fits nowhere."""
    arrangement = advice.chosen or advice.needed
    if arrangement is None:
        return None
    words = ["localllm serve", plan.name, arrangement.flags]
    if plan.fit.quant in QUANTS:
        words.append(f"--quant {plan.fit.quant}")
    if arrangement.parallel.pipeline == 1 and arrangement.engines > 1:
        words.append(f"--replicas {arrangement.engines}" + (" --cluster" if advice.pool.machines > 1 else ""))
    return " ".join(filter(None, words))


def advice_json(advice: Advice | None, plan: Plan) -> dict[str, Any] | None:
    """Object of `--json` with the ways to use several devices; None for a model that fits the only one."""
    if advice is None:
        return None
    pool, needed = advice.pool, advice.needed

    def arrangement_json(each: Arrangement) -> dict[str, Any]:
        return {
            "tensor_parallel": each.parallel.tensor,
            "pipeline_parallel": each.parallel.pipeline,
            "engines": each.engines,
            "fits": each.fits,
            "refusal": each.refusal,
            "weight_bytes": each.fit.weights.total if each.fit else None,
            "cached_tokens": each.cached_tokens,
            "sent_bytes_per_token": each.sent_bytes,
            "ttft_s": each.speed.ttft_s if each.speed else None,
            "tpot_s": 1 / each.speed.tokens_per_s if each.speed else None,
        }

    return {
        "devices": pool.device.count,
        "machines": pool.machines,
        "arrangements": [arrangement_json(each) for each in advice.arrangements],
        "needed": arrangement_json(needed) if needed else None,
        "command": advised_command(advice, plan),
        "source": advice.source,
    }


def serving_json(serving: "ServingPlan | None") -> dict[str, Any] | None:
    """Object of `--json` for `--slo`; None without it."""
    if serving is None:
        return None
    load = serving.load

    return {
        "users": serving.users,
        "think_s": load.think_s,
        "prompt": str(load.prompt),
        "output": str(load.output),
        "objectives_s": serving.objective.limits,
        "attainment": serving.objective.attainment,
        "options": [asdict(option) for option in serving.options],
        "choice": serving.choice.flags if serving.choice else None,
        "devices": serving.devices,
    }


def read_or_fetch_header(
    model: str, load_options: LoadOptions, gpu: str | None, device: str
) -> tuple[str, Header]:
    """Name and header of a model; for one that is not local, the header is downloaded with ranged requests, unless
    it comes with the program.

    A catalog name without a format is then the edition that the device would get.
    """
    if repo := missing_repo(model):
        if header := published_header(model):
            return model, header
        from localllm.checkpoint.remote import remote_header  # imports the Hub's library
        from localllm.cli.loading import free_memory
        from localllm.hub.pull import plan_pull
        from localllm.llm.edition_choice import choose_edition

        with status(f"reading the header of {repo}"):
            if repo.entry is None:
                return model, remote_header(plan_pull(repo, note), note)
            target = find_devices(gpu) if gpu else free_memory(device)
            choice = choose_edition(repo.entry, target, load_options, note)
            name = model if choice.edition is repo.entry else choice.edition.name
            return name, remote_header(choice.plan, note)
    ref = resolve_model(model)
    return ref.name, read_header(ref.path)


def format_plan(plan: Plan) -> str:
    """The report as text of at most 80 columns, without a final line break."""
    return "\n\n".join(
        [
            format_columns([*_device_rows(plan), ("", ""), *_memory_rows(plan)]),
            _speed_table(plan),
            *_quantization_tables(plan),
        ]
    )


def _device_rows(plan: Plan) -> Rows:
    hardware = plan.hardware
    rates = f"reads {format_bytes(hardware.bandwidth)}/s, computes {format_flops(hardware.flops)}"
    return [
        *_wrapped("model", f"{plan.name}, {_mark_published(plan.chosen, plan)}"),
        *_wrapped(
            "device", f"{plan.parallel.devices} x {hardware.name}" if plan.parallel.devices > 1 else hardware.name
        ),
        ("", f"{rates} each" if plan.parallel.devices > 1 else rates),
        *_wrapped("", hardware.source),
    ]


def _memory_rows(plan: Plan) -> Rows:
    fit = plan.fit
    users = f" for {plan.users} users" if plan.users > 1 else ""
    states = [("states", f"{format_bytes(plan.state_bytes)}{users}, of recurrent layers")]
    verdict = f"no: {fit.refusal.message}; {plan.remedy}" if fit.refusal else "yes"
    return [
        (
            "weights",
            format_bytes(fit.weights.total) + (" in the largest process" if plan.parallel.devices > 1 else ""),
        ),
        *_cache_rows(plan),
        *(states if plan.state_bytes else []),
        ("activations", format_bytes(plan.activation_bytes)),
        (
            "total",
            f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.hardware.memory_bytes)}",
        ),
        *_wrapped("fits", verdict),
        *_capacity_rows(plan),
    ]


def _cache_rows(plan: Plan) -> Rows:
    """Size of the KV cache, and what a decode step reads of it if that differs."""
    one_user = f"{format_bytes(plan.kv_bytes_per_sequence)} for {plan.context} tokens"
    all_users = f"{format_bytes(plan.kv_bytes)} for {plan.users} users, " if plan.users > 1 else ""
    dtype = f" in {plan.fit.kv_dtype}" if plan.fit.kv_dtype != plan.fit.dtype else ""
    per_token = f"{format_bytes(plan.kv_bytes_per_token)} per token{dtype}"
    rows = _wrapped("KV cache", f"{all_users}{one_user}, {per_token}")
    full_bytes = plan.context * plan.kv_bytes_per_token
    if plan.kv_bytes_read < full_bytes:
        rows.append(("", f"{format_bytes(plan.kv_bytes_read)} read per token: some layers use a sliding window"))
    elif plan.kv_bytes_read > full_bytes:
        rows.append(("", f"{format_bytes(plan.kv_bytes_read)} read per token: some layers share their cache"))
    return rows


def _capacity_rows(plan: Plan) -> Rows:
    """Largest context and number of users that fit into memory, if any."""
    fit = plan.fit
    if not fit.max_context:
        return []
    rows = [("largest context", f"{fit.max_context} tokens for one user, the model supports {plan.max_context}")]
    if fit.fits:
        limit = f"; localllm runs {fit.concurrent_users}" if fit.max_users > fit.concurrent_users else ""
        rows.append(("users", f"{fit.max_users} at once with {plan.context} tokens each{limit}"))
    return rows


def _speed_table(plan: Plan) -> str:
    """Table of the highest possible speed, and of the expected or estimated speed if it is known."""
    if plan.estimate:
        return _estimate_table(plan, plan.estimate)
    columns = [("AT MOST", plan.chosen.ceiling), *([("EXPECTED", plan.expected)] if plan.expected else [])]

    def total(speed: Speed) -> str:
        return f"{format_rate(speed.all_tokens_per_s)} of {speed.users}"

    speeds = [speed for _, speed in columns]
    rows = [
        ("SPEED", *(head for head, _ in columns)),
        (f"TTFT of {plan.prompt} tokens", *(format_seconds(speed.ttft_s) for speed in speeds)),
        ("decoding, empty cache", *(format_rate(speed.first_tokens_per_s) for speed in speeds)),
        (
            f"decoding, {plan.context} tokens cached",
            *(format_rate(speed.tokens_per_s) for speed in speeds),
        ),
        *([("all users", *map(total, speeds))] if plan.users > 1 else []),
        ("bound by", *(BOUND_NAMES[speed.bound] for speed in speeds)),
    ]
    source = textwrap.fill(f"expected from {plan.expectation.source}", PAGE_WIDTH) if plan.expectation else ""
    return "\n".join([format_table(rows), *([source] if source else [])])


def _estimate_table(plan: Plan, estimate: Estimate) -> str:
    """Table of the highest possible speed, and of the estimate of decoding for a single user."""
    ceiling, unknown = plan.chosen.ceiling, "-"

    def span(rate: EstimatedRate) -> str:
        return f"{format_rate(rate.slowest).partition(' ')[0]} to {format_rate(rate.fastest)}"

    rows = [
        ("SPEED", "AT MOST", "ESTIMATED"),
        (f"TTFT of {plan.prompt} tokens", format_seconds(ceiling.ttft_s), unknown),
        ("decoding, empty cache", format_rate(ceiling.first_tokens_per_s), span(estimate.first_tokens_per_s)),
        (
            f"decoding, {plan.context} tokens cached",
            format_rate(ceiling.tokens_per_s),
            span(estimate.tokens_per_s),
        ),
    ]
    if plan.users > 1:
        rows.append(("all users", f"{format_rate(ceiling.all_tokens_per_s)} of {ceiling.users}", unknown))
    rows.append(("bound by", BOUND_NAMES[ceiling.bound], ""))
    source = textwrap.fill(f"estimated from {estimate.source}", PAGE_WIDTH)
    return f"{format_table(rows)}\n{source}"


def _quantization_tables(plan: Plan) -> list[str]:
    """Table of quantizations, and notes on it; empty for a model that is stored quantized."""
    if plan.stored_as:
        return []
    head = ("QUANTIZATION", "WEIGHTS", "FITS", "LARGEST CONTEXT", "TTFT", "DECODING AT MOST")
    rows = [
        (
            _mark_published(choice, plan),
            format_bytes(choice.fit.weights.total),
            "yes" if choice.fit.fits else "no",
            str(choice.fit.max_context or "-"),
            format_seconds(choice.ceiling.ttft_s),
            format_rate(choice.ceiling.tokens_per_s),
        )
        for choice in plan.choices
    ]
    best = _quantization_name(plan.best, plan) if plan.best else "none"
    notes = [f"best that fits: {best}", f"* {PUBLISHED_NOTE}"]
    if len({choice.fit.context for choice in plan.choices}) > 1:
        notes.insert(0, CONTEXTS_DIFFER_NOTE)
    return [format_table([head, *rows]), "\n".join(notes)]


def _quantization_name(choice: Choice, plan: Plan) -> str:
    quant = choice.fit.quant
    if quant is None:
        return f"as stored ({plan.stored_as or choice.fit.dtype})"
    return f"GGUF {quant.upper()}, about" if quant in GGUF_BITS else quant.upper()


def _mark_published(choice: Choice, plan: Plan) -> str:
    """Name of the quantization, with a mark if it needs a published file."""
    return _quantization_name(choice, plan) + (" *" if choice.fit.quant in GGUF_BITS else "")


def _wrapped(name: str, text: str) -> Rows:
    lines = textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Object that `--json` prints; docs/plan.md describes its fields."""
    fit, hardware = plan.fit, plan.hardware
    return {
        "model": plan.name,
        "device": {
            "name": hardware.name,
            "kind": hardware.device_type,
            "memory_bytes": hardware.memory_bytes,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.flops,
            "measured": hardware.measured,
            "source": hardware.source,
        },
        "stored_as": plan.stored_as,
        "quant": fit.quant,
        "dtype": fit.dtype,
        "kv_dtype": fit.kv_dtype,
        "context": plan.context,
        "max_context": plan.max_context,
        "users": plan.users,
        "prompt": plan.prompt,
        "tensor_parallel": plan.parallel.tensor,
        "pipeline_parallel": plan.parallel.pipeline,
        "weight_bytes": fit.weights.total,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_bytes_per_token_in_8_bits": plan.kv_bytes_per_token_in_8_bits,
        "kv_bytes_per_token_in_4_bits": plan.kv_bytes_per_token_in_4_bits,
        "kv_bytes_per_sequence": plan.kv_bytes_per_sequence,
        "kv_bytes_read": plan.kv_bytes_read,
        "kv_bytes": plan.kv_bytes,
        "state_bytes_per_sequence": plan.state_bytes_per_sequence,
        "state_bytes": plan.state_bytes,
        "activation_bytes": plan.activation_bytes,
        "total_bytes": plan.total_bytes,
        "allocated_bytes": fit.memory.total if fit.memory else None,
        "fits": fit.fits,
        "refusal": fit.refusal.message if fit.refusal else None,
        "remedy": plan.remedy,
        "most_context": fit.max_context,
        "most_users": fit.max_users,
        "engine_users": fit.concurrent_users,
        "ceiling": vars(plan.chosen.ceiling),
        "expected": vars(plan.expected) if plan.expected else None,
        "expectation": plan.expectation.source if plan.expectation else None,
        "estimate": asdict(plan.estimate) if plan.estimate else None,
        "quantizations": [_choice_json(choice) for choice in plan.choices],
        "best": _quant_name(plan.best, plan),
    }


def _quant_name(choice: Choice | None, plan: Plan) -> str | None:
    """Quantization such as `int8`, or the stored format."""
    return (choice.fit.quant or plan.stored_as or choice.fit.dtype) if choice else None


def _choice_json(choice: Choice) -> dict[str, Any]:
    fit = choice.fit
    return {
        "quant": fit.quant,
        "dtype": fit.dtype,
        "weight_bytes": fit.weights.total,
        "fits": fit.fits,
        "most_context": fit.max_context,
        "ceiling": vars(choice.ceiling),
    }

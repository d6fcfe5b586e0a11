"""`localllm plan`: whether a model fits this machine or a GPU, and how fast it would run there."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.published import published_header
from localllm.cli import options
from localllm.cli.io import StdoutWriter, note, status
from localllm.cli.loading import free_memory_for, parse_load_options
from localllm.cli.plan_page import advice_json, format_advice, format_plan, format_serving, plan_json, serving_json
from localllm.cli.progress import status_line
from localllm.errors import DoesNotFit, UsageError
from localllm.formatting import parse_duration
from localllm.hardware.catalog import DeviceSpec, find_devices
from localllm.hub.names import is_path
from localllm.hub.resolve import missing_repo, resolve_model
from localllm.plan.advice import ASSUMED_NETWORK, Advice, Pool, PrefillAdvice, advise
from localllm.plan.expected import expect_on_catalogued, expect_on_device
from localllm.plan.fit import GPUS_PER_MACHINE, LoadOptions
from localllm.plan.parallel import parse_link
from localllm.plan.plan import plan_model as make_plan
from localllm.plan.weights import check_quant
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.simulate.serving import ServingPlan  # imports torch
    from localllm.simulate.target import Target

DEFAULT_THINK = "20s"
MIN_REQUESTS, ENOUGH_REQUESTS = 300, 1000  # of a simulation, where they are a few of each user


def plan(
    model: options.ModelName,
    gpu: Annotated[
        str | None,
        options.option(
            "--gpu", text="GPU to plan for, such as h100 or 4090; h100:8 for a machine with 8.", metavar="NAME[:N]"
        ),
    ] = None,
    machines: Annotated[
        int, options.option("--machines", text="Number of machines; default: 1.", metavar="N")
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
            text="Latency objectives, such as ttft=500ms,tpot=50ms: simulate users, and find settings for them.",
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
        options.option(
            "--network",
            text="Link between machines: bandwidth and latency; default: 1.25GB/s,50us.",
            metavar="B[,L]",
        ),
    ] = None,
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    expert_parallel: options.ExpertParallel = False,
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
    --tensor-parallel within a machine, --expert-parallel for MoE models, --pipeline-parallel between machines.

    With --slo, --users is the number of users who read an answer and think before the next request, instead of the
    number of contexts that are full at once; their load is simulated, as by `localllm simulate`.
    """
    out = StdoutWriter()
    settings = Settings.from_environment()
    if gpu and device:
        raise UsageError("--gpu plans for another machine, --device for this one", "leave one of them out")
    check_quant(quant)  # before the header is downloaded
    limits = parse_serving_flags(slo, think, output, users)
    load_options = parse_load_options(
        settings,
        context=context,
        users=1 if slo else users,
        quant=quant,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        workers=workers,
        token_file=token_file,
    )
    if workers and (gpu or machines > 1):
        flag = "--gpu" if gpu else "--machines"
        raise UsageError(f"--workers plans for this machine and others, not with {flag}", "leave one of them out")
    if slo and load_options.processes > 1:
        raise UsageError("--slo plans for one device", "use `localllm simulate` with --tensor-parallel")
    if machines < 1:
        raise UsageError(f"--machines is {machines}", "give a whole number from 1")
    if network and machines == 1:
        raise UsageError("--network is between machines", "add --machines, or leave it out")
    links = parse_link(link) if link else None, parse_link(network, "--network") if network else ASSUMED_NETWORK
    workers_bytes = (
        free_memory_for(load_options, device or settings.device, settings).stage_bytes if workers else ()
    )
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
    machine = None if gpu else hardware
    if workers_bytes:
        machines = len(workers_bytes)
        hardware = replace(hardware, count=Pool(hardware).stage_devices(load_options))
    elif (requested := Pool(hardware).devices_of(load_options)) > hardware.count * machines:
        hardware = replace(hardware, count=requested)
    pool = Pool(hardware, machines, *links)
    hardware = replace(hardware, stage_bytes=workers_bytes) if workers_bytes else pool.device_of(load_options)
    parallel = pool.divide(load_options)
    result = make_plan(
        header, hardware, load_options, name=name, prompt=prompt, expectation=expectation, parallel=parallel
    )
    advice = None
    if not workers_bytes and (pool.devices > 1 or parallel.devices > 1 or not result.fit.fits):
        advice = advise(header, pool, load_options, name=name, prompt=result.prompt, expectation=expectation)
    as_typed = model if is_path(model) else name
    typed = shlex.quote(as_typed)
    planned = PlannedModel(name, header, gpu, device or "auto", settings, as_typed, machine)
    lengths = {"prompt": prompt, "output": output}
    if advice and users > 1 and not slo:  # users of --slo are fewer requests at once
        advice = replace(advice, prefill=advise_prefill(planned, load_options, advice, lengths))
    serving = None
    if limits:
        serving = simulate_users(
            planned,
            load_options,
            limits=limits,
            users=users,
            think_s=parse_duration(think or DEFAULT_THINK),
            lengths=lengths,
        )
    if as_json:
        more = {"advice": advice_json(advice, result, typed), "serving": serving_json(serving)}
        out.write(json.dumps(plan_json(result) | more, indent=1) + "\n")
    else:
        parts = [format_plan(result)]
        parts += [format_advice(advice, result, typed)] if advice else []
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
    from localllm.cli.simulate_setup import parse_objectives

    if users < 1 or (output is not None and output < 1):
        raise UsageError("--users and --output count from 1", "give whole numbers from 1")
    return parse_objectives(slo)


@dataclass(frozen=True)
class PlannedModel:
    """A model and the device that it is planned for."""

    name: str
    header: Header
    gpu: str | None  # of the catalogue, with the number of a machine; None: a device of this machine
    device: str  # of this machine
    settings: Settings
    typed: str  # how commands name it
    machine: DeviceSpec | None  # the device of this machine, as measured

    @property
    def gpu_spec(self) -> DeviceSpec | None:
        return find_devices(self.gpu) if self.gpu else None

    def has_fitted_steps(self, options: LoadOptions) -> bool:
        """Return whether durations of steps on this machine are known from recorded ones."""
        if self.gpu:
            return False
        from localllm.plan.expected import step_setup
        from localllm.simulate.target import RecordedFit, fit_recorded

        setup, _ = step_setup(self.header, options, self.device, self.settings, name=self.name)
        return isinstance(fit_recorded(self.settings.home, setup, note, name=self.name), RecordedFit)

    def target(self, options: LoadOptions, *, by_steps: bool = True) -> "Target":
        """Return the engine on one device, for simulations. Raises DoesNotFit, and the errors of `target_of`.

        by_steps: as in `target_of`
        """
        from localllm.cli.simulate_setup import target_of

        gpu = self.gpu_spec.name if self.gpu_spec else None
        return target_of(
            self.name,
            self.header,
            options,
            gpu,
            self.device,
            self.settings,
            typed=self.typed,
            by_steps=by_steps,
            machine=self.machine,
        )


def drawn_lengths(target: "Target", lengths: Mapping[str, int | None]) -> dict[str, Any]:
    """Return lengths of prompts and answers that vary around the given medians, None for a default."""
    from localllm.cli.simulate_setup import default_lengths
    from localllm.simulate.load import Lengths

    drawn = default_lengths(target.setup.context)
    return drawn | {which: Lengths(tokens, drawn[which].sigma) for which, tokens in lengths.items() if tokens}


def simulate_users(
    planned: PlannedModel,
    load_options: LoadOptions,
    *,
    limits: dict[str, float],
    users: int,
    think_s: float,
    lengths: Mapping[str, int | None],
) -> "ServingPlan":
    """Simulate users with settings of decreasing quality. Of these it compares those whose durations have the same
    source.

    limits: in seconds by measure; lengths: of prompts and answers, None for a default
    """
    from localllm.simulate.capacity import Objective
    from localllm.simulate.load import LoadPlan
    from localllm.simulate.serving import plan_serving, serving_settings

    def make_load(target: "Target") -> LoadPlan:
        requests = max(MIN_REQUESTS, min(4 * users, ENOUGH_REQUESTS), 2 * users)
        drawn = drawn_lengths(target, lengths)
        return LoadPlan(users=users, think_s=think_s, requests=requests, max_len=target.setup.capacity, **drawn)

    can_quantize = load_options.quant is None and not planned.header.quantization
    tried, others = serving_settings(load_options, planned.gpu_spec, can_quantize=can_quantize), list[str]()
    if by_steps := planned.has_fitted_steps(load_options):
        others = [flags for flags, options in tried if not planned.has_fitted_steps(options)]
        tried = [(flags, options) for flags, options in tried if flags not in others]
    make_target = partial(planned.target, by_steps=by_steps)
    with status_line() as show_status:
        serving = plan_serving(tried, make_target, make_load, Objective(limits), show_status)
    return serving if serving.choice else replace(serving, not_compared=tuple(others))


def advise_prefill(
    planned: PlannedModel, load_options: LoadOptions, advice: Advice, lengths: Mapping[str, int | None]
) -> PrefillAdvice | None:
    """Return engines for prompts on half of a machine's GPUs and for answers on the others; None unless they serve
    more than a replica on each in a simulation, of the load by which `serve` decides and of the given lengths."""
    from localllm.simulate.apart import IDLE_RATE, compare_apart
    from localllm.simulate.load import LoadPlan

    device, chosen = advice.pool.device, advice.chosen
    if device.device_type == "cpu" or advice.pool.machines > 1 or not 1 < device.count <= GPUS_PER_MACHINE:
        return None
    if chosen is None or chosen.parallel.devices > 1 or parse_config(planned.header.config).encoder:
        return None
    target = planned.target(replace(load_options.in_one_process(), users=1))
    loads = [drawn_lengths(target, {})]
    if (given := drawn_lengths(target, lengths)) not in loads:
        loads.append(given)
    result = None
    for drawn in loads:
        load = LoadPlan(rate=IDLE_RATE, max_len=target.setup.capacity, **drawn)
        with status(f"simulating {planned.name} with and without --prefill"):
            decode = device.count // 2
            result = compare_apart(target, load, device.count - decode, decode)
        if not result.pays:
            return None
    assert result
    return PrefillAdvice(result.prefill, result.decode, result.apart, result.together, result.sentence())


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

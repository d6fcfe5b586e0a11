"""`localllm simulate`: how a model would serve a load on this machine or a GPU, without computing anything."""

import json
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.cli.progress import status_line
from localllm.cli.simulate_setup import (
    BATCHING,
    ORDERS,
    PreparedSimulation,
    check_replayable,
    prepare_simulation,
    run_prepared,
)
from localllm.errors import UsageError
from localllm.routing import ROUTES
from localllm.settings import Settings

TERMINAL = "-"  # instead of a file
PAGE_WIDTH = 80


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
    expert_parallel: Annotated[
        bool,
        options.switch(
            "--expert-parallel",
            text="With --tensor-parallel, divide mixtures by whole experts.",
            panel=options.Panel.FLEET,
        ),
    ] = False,
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
        run_check(check, simulation, out, as_json=as_json)
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

        from localllm.benchmark.simulation_plot import format_gantt

        out.write("\n")
        console = Console(highlight=False, width=None if out.terminal else PAGE_WIDTH)
        console.print(format_gantt(report, console.width), end="", no_wrap=True, crop=False)
    elif gantt_file:
        from localllm.benchmark.simulation_plot import draw_gantt

        draw_gantt(report, gantt_file)


def run_check(url: str, simulation: PreparedSimulation, out: StdoutWriter, *, as_json: bool) -> None:
    """Send a load to a server, print predicted and measured figures, and keep them."""
    from localllm.benchmark.load.check import as_dict, check_server, format_check, keep_check
    from localllm.benchmark.load.client import normalize_url

    with status_line() as show_status:
        result, _ = check_server(normalize_url(url), simulation.load, simulation.target, report=show_status)
    keep_check(Settings.from_environment().home, result, note)
    text = json.dumps(as_dict(result), indent=1, allow_nan=False) if as_json else format_check(result)
    out.write(text + "\n")

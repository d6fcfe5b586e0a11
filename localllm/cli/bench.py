"""`localllm bench`: how fast models are on this machine, and what they wait for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from localllm.benchmark.scenario import ScenarioGrid, parse_numbers
from localllm.cli import against as servers
from localllm.cli import io, options
from localllm.cli.io import StdoutWriter
from localllm.cli.loading import quantize_missing, resolve_or_fetch
from localllm.cli.progress import status_line
from localllm.errors import UsageError
from localllm.plan.weights import QUANTS
from localllm.settings import Settings

DEFAULT_ROUNDS, COMPARE_ROUNDS = 5, 10
AS_STORED = "none"


def bench(
    ctx: typer.Context,
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL...", hidden=True)] = None,
    compare: Annotated[
        bool, options.switch("--compare", text="Compare the speed of two models, or of two quantizations of one.")
    ] = False,
    prompt: Annotated[
        str | None, options.option("--prompt", text="Prompt lengths in tokens; default: 512.", metavar="N,...")
    ] = None,
    depth: Annotated[
        str | None, options.option("--depth", text="Cached tokens before the prompt; default: 0.", metavar="N,...")
    ] = None,
    batch: Annotated[
        str | None, options.option("--batch", text="Batch sizes in sequences; default: 1.", metavar="N,...")
    ] = None,
    output: Annotated[
        str | None, options.option("--output", text="Answer lengths in tokens; default: 24.", metavar="N,...")
    ] = None,
    quant: Annotated[
        str | None,
        options.option(
            "--quant",
            text="Quantizations: none, int8 or int4; default: none.",
            metavar="QUANT,...",
            panel=options.Panel.MODEL,
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        options.option(
            "--repeat",
            text=f"Rounds to measure; default: {DEFAULT_ROUNDS}, or {COMPARE_ROUNDS} with --compare.",
            metavar="N",
        ),
    ] = None,
    text: Annotated[
        str | None,
        options.option("--text", text="Take prompts from this text instead of random tokens.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.", metavar="N")] = 0,
    draft: Annotated[
        bool,
        options.switch(
            "--draft", text="Enable speculative decoding; default: off.", panel=options.Panel.SPECULATION
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        options.option(
            "--plot", text="Plot the results to a PNG or SVG file.", metavar="FILE", panel=options.Panel.OUTPUT
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    as_json: options.Json = False,
    as_csv: Annotated[
        bool, options.switch("--csv", text="Print comma-separated values.", panel=options.Panel.OUTPUT)
    ] = False,
    as_markdown: Annotated[
        bool, options.switch("--markdown", text="Print a Markdown table.", panel=options.Panel.OUTPUT)
    ] = False,
    against: Annotated[
        list[str] | None,
        options.option(
            "--against",
            text="URL of a running server to benchmark. Repeatable.",
            metavar="URL",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    api: Annotated[
        str | None,
        options.option(
            "--api",
            text="API to call: completions, chat, ollama-generate or ollama-chat.",
            metavar="API",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        options.option(
            "--concurrency",
            text="Maximum number of concurrent requests; default: 1.",
            metavar="N",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        options.option(
            "--rate",
            text="Request rate per second, independent of completions.",
            metavar="R",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        options.option(
            "--requests",
            text="Maximum requests per round; default: 32, or no limit with --duration.",
            metavar="N",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        options.option(
            "--duration",
            text="Stop sending requests after this time in each round, in seconds.",
            metavar="SECONDS",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        options.option(
            "--slo",
            text="Service level objectives for goodput: ttft=500ms,tpot=50ms.",
            metavar="NAME=TIME,...",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        options.option(
            "--shared-prefix",
            text="Length of a prefix shared by all prompts, in tokens.",
            metavar="N",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        options.switch(
            "--ignore-eos", text="Ask the server to ignore end-of-sequence tokens.", panel=options.Panel.LOAD_TEST
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        options.option(
            "--timeout",
            text="Request timeout in seconds; default: 120.",
            metavar="SECONDS",
            panel=options.Panel.LOAD_TEST,
        ),
    ] = None,
) -> None:
    """Benchmark models on this machine, or running servers.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Flags marked N,...
    take comma-separated lists such as 128,512; every combination is measured. docs/bench.md explains every number.

    With --against, running servers are measured, and MODEL is the name that they use. The flags under "Load test"
    apply only to servers.
    """
    out = StdoutWriter()
    if as_json + as_csv + as_markdown > 1:
        raise UsageError("--json, --csv and --markdown are three forms of one answer", "ask for one of them")
    if against:
        servers.run_load_test(against, models or (), ctx.params, out)
        return
    servers.refuse_flags(ctx.params, servers.LOAD_TEST_FLAGS, "is for servers, and none is given with --against")
    if not models:
        raise UsageError("no model is named", "name one, or a server with --against")
    asked = ScenarioGrid(
        parse_numbers(prompt, "--prompt"),
        parse_numbers(depth, "--depth", 0) or (0,),
        parse_numbers(batch, "--batch") or (1,),
        parse_numbers(output, "--output"),
    )
    rounds = repeat if repeat is not None else COMPARE_ROUNDS if compare else DEFAULT_ROUNDS
    if rounds < 1:
        raise UsageError(f"--repeat is {rounds}", "give a whole number from 1")
    wanted = select_models(models, parse_quants(quant), compare=compare)
    settings = Settings.from_environment()
    content = None if text is None else io.read_text(text)
    for model, each in wanted:
        ref = resolve_or_fetch(
            model, settings, device=device, dtype=dtype, context=None, kv_dtype=kv_dtype, quant=each
        )
        if each:
            quantize_missing(ref, each, settings)
    with status_line() as say:
        from localllm.benchmark import plot as plots
        from localllm.benchmark import report
        from localllm.benchmark.run import RANDOM_PROMPTS, BenchmarkPlan, load_subject, run_benchmark
        from localllm.benchmark.versus import compare_models as versus
        from localllm.cli.bench_page import format_benchmark

        if plot:
            plots.check_plot(plot)
        plan = BenchmarkPlan(
            asked, rounds, seed, content, RANDOM_PROMPTS if text is None else io.display_name(text), draft
        )
        editions = [
            load_subject(model, each, settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
            for model, each in wanted
        ]
        result = versus(editions[0], editions[1], plan, say) if compare else run_benchmark(editions, plan, say)
        if plot:
            plots.draw_result(result, plot)
    if as_json:
        out.write(json.dumps(report.as_dict(result), indent=1, allow_nan=False) + "\n")
    elif as_csv or as_markdown:
        out.write(report.as_csv(result) if as_csv else report.as_markdown(result))
    else:
        out.write(format_benchmark(result) + "\n")


def parse_quants(text: str | None) -> Sequence[str | None]:
    """`none,int8` as names. Raises UsageError for one that is not known."""
    words = [word.strip() for word in (text or AS_STORED).split(",")]
    unknown = next((word for word in words if word not in (AS_STORED, *QUANTS)), None)
    if unknown is not None:
        raise UsageError(f"--quant holds {unknown!r}", f"name {AS_STORED}, {' or '.join(QUANTS)}")
    return [None if word == AS_STORED else word for word in dict.fromkeys(words)]


def select_models(
    models: Sequence[str], quants: Sequence[str | None], *, compare: bool
) -> list[tuple[str, str | None]]:
    """Models with what each is quantized to. Raises UsageError where that is not one model, or two to compare."""
    if not compare:
        if len(models) > 1:
            raise UsageError(f"{len(models)} models are named", "name one, or two with --compare")
        return [(models[0], quant) for quant in quants]
    if len(models) == 2:
        return list(zip(models, quants if len(quants) == 2 else [quants[0]] * 2, strict=True))
    if len(models) == 1 and len(quants) == 2:
        return [(models[0], quant) for quant in quants]
    raise UsageError("--compare takes two", "name two models, or one with --quant none,int8, say")

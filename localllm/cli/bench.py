"""`localllm bench`: benchmark models on this machine, or the load on running servers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.benchmark.scenario import ScenarioGrid, parse_numbers
from localllm.cli import io, options
from localllm.cli.io import StdoutWriter
from localllm.cli.loading import parse_load_options, quantize_missing, resolve_for
from localllm.cli.progress import status_line
from localllm.errors import UsageError
from localllm.formatting import format_columns, format_table
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
    explain: Annotated[
        bool,
        options.switch(
            "--explain",
            text="Show kernel, instructions and memory bandwidth of each matrix product.",
            panel=options.Panel.OUTPUT,
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
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    expert_parallel: options.ExpertParallel = False,
    workers: options.Workers = None,
    token_file: options.TokenFile = None,
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
            choices=("completions", "chat", "ollama-generate", "ollama-chat"),
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
        raise UsageError("--json, --csv and --markdown cannot be combined", "leave out all but one")
    if against:
        run_load_test(against, models or (), ctx.params, out)
        return
    refuse_flags(ctx.params, LOAD_TEST_FIELDS, "applies only to servers, and there is no --against")
    if not models:
        raise UsageError("no model is named", "name one, or a server with --against")
    grid = ScenarioGrid(
        parse_numbers(prompt, "--prompt"),
        parse_numbers(depth, "--depth", 0) or (0,),
        parse_numbers(batch, "--batch") or (1,),
        parse_numbers(output, "--output"),
    )
    rounds = repeat if repeat is not None else COMPARE_ROUNDS if compare else DEFAULT_ROUNDS
    if rounds < 1:
        raise UsageError(f"--repeat is {rounds}", "give a whole number from 1")
    variants = select_models(models, parse_quants(quant), compare=compare)
    settings = Settings.from_environment()
    content = None if text is None else io.read_text(text)
    load_options = parse_load_options(
        settings,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        workers=workers,
        token_file=token_file,
    )
    for model, model_quant in variants:
        ref = resolve_for(replace(load_options, quant=model_quant), model, settings, device=device)
        if model_quant:
            quantize_missing(ref, model_quant, settings)
    with status_line() as show_status:
        from localllm.benchmark import plot as plotting
        from localllm.benchmark import report
        from localllm.benchmark.run import (
            RANDOM_PROMPTS,
            BenchmarkPlan,
            compare_models,
            load_subject,
            run_benchmark,
        )
        from localllm.cli.bench_page import format_benchmark

        if plot:
            plotting.check_plot(plot)
        plan = BenchmarkPlan(
            grid,
            rounds,
            seed=seed,
            text=content,
            text_name=RANDOM_PROMPTS if text is None else io.display_name(text),
            drafts=draft,
            explain=explain,
            record_steps=lambda llm, name: llm.record_steps(settings.home, io.note, name),
        )
        subjects = [
            load_subject(model, settings, device=device, options=replace(load_options, quant=model_quant))
            for model, model_quant in variants
        ]
        if compare:
            result = compare_models(subjects[0], subjects[1], plan, show_status)
        else:
            result = run_benchmark(subjects, plan, show_status)
        if plot:
            plotting.draw_result(result, plot)
    if as_json:
        out.write(json.dumps(report.as_dict(result), indent=1, allow_nan=False) + "\n")
    elif as_csv or as_markdown:
        out.write(report.as_csv(result) if as_csv else report.as_markdown(result))
    else:
        out.write(format_benchmark(result) + "\n")


def parse_quants(text: str | None) -> Sequence[str | None]:
    """Quantizations of `none,int8`, without duplicates. Raises UsageError for an unknown one."""
    names = [name.strip() for name in (text or AS_STORED).split(",")]
    unknown = next((name for name in names if name not in (AS_STORED, *QUANTS)), None)
    if unknown is not None:
        raise UsageError(f"--quant contains {unknown!r}", f"give {AS_STORED}, {' or '.join(QUANTS)}")
    return [None if name == AS_STORED else name for name in dict.fromkeys(names)]


def select_models(
    models: Sequence[str], quants: Sequence[str | None], *, compare: bool
) -> list[tuple[str, str | None]]:
    """Models with the quantization of each. Raises UsageError unless there is one model, or two to compare."""
    if not compare:
        if len(models) > 1:
            raise UsageError(f"{len(models)} models are named", "name one, or two with --compare")
        return [(models[0], quant) for quant in quants]
    if len(models) == 2:
        return list(zip(models, quants if len(quants) == 2 else [quants[0]] * 2, strict=True))
    if len(models) == 1 and len(quants) == 2:
        return [(models[0], quant) for quant in quants]
    raise UsageError("--compare needs two models", "name two, or one with --quant none,int8")


LOAD_TEST_FIELDS = (
    "api",
    "concurrency",
    "rate",
    "requests",
    "duration",
    "slo",
    "shared_prefix",
    "ignore_eos",
    "timeout",
)
LOCAL_FIELDS = (
    "compare",
    "depth",
    "batch",
    "quant",
    "draft",
    "plot",
    "device",
    "dtype",
    "kv_dtype",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "workers",
)


def refuse_flags(flags: Mapping[str, Any], fields: Sequence[str], reason: str) -> None:
    """Raises UsageError if one of these flags is set."""
    for field in fields:
        if flags.get(field) not in (None, False):
            raise UsageError(f"{io.flag_name(field)} {reason}", "leave it out")


def run_load_test(
    urls: Sequence[str], models: Sequence[str], flags: Mapping[str, Any], out: io.StdoutWriter
) -> None:
    """Benchmark servers and print the result. Raises KeyboardInterrupt if the run was interrupted, after printing
    what was measured until then."""
    refuse_flags(flags, LOCAL_FIELDS, "applies only to models loaded in this process, not with --against")
    if len(models) > 1:
        raise UsageError(f"{len(models)} models are named", "name at most one, by the servers' name for it")
    from localllm.benchmark.load import report as load_report
    from localllm.benchmark.load.client import SERVER_APIS, normalize_url
    from localllm.benchmark.load.drive import Load
    from localllm.benchmark.load.outcome import LatencyObjective
    from localllm.benchmark.load.run import LoadPlan, measure_servers

    if flags["api"] not in (None, *SERVER_APIS):
        raise UsageError(f"--api is {flags['api']!r}", f"give one of {', '.join(SERVER_APIS)}")
    if flags["rate"] is not None and flags["concurrency"] is not None:
        raise UsageError("--rate and --concurrency cannot be combined", "leave one of them out")
    requests, duration = flags["requests"], flags["duration"]
    settings = {
        "prompt": _parse_int(flags["prompt"], "--prompt"),
        "output": _parse_int(flags["output"], "--output"),
        "rounds": flags["repeat"],
        "shared_prefix": flags["shared_prefix"],
        "timeout_s": flags["timeout"],
        "objective": flags["slo"] and LatencyObjective.parse(flags["slo"]),
        "text": flags["text"] and _read_words(flags["text"]),
    }
    plan = LoadPlan(
        Load(
            32 if requests is None and duration is None else requests,
            duration,
            1 if flags["concurrency"] is None else flags["concurrency"],
            flags["rate"],
        ),
        seed=flags["seed"],
        ignore_eos=flags["ignore_eos"],
        **{name: value for name, value in settings.items() if value is not None},
    )
    with status_line() as show_status:
        result = measure_servers(
            plan, [normalize_url(url) for url in urls], flags["api"], next(iter(models), None), show_status
        )
    if flags["as_json"]:
        out.write(json.dumps(load_report.as_dict(result), indent=1, allow_nan=False) + "\n")
    elif flags["as_csv"] or flags["as_markdown"]:
        out.write((load_report.as_csv if flags["as_csv"] else load_report.as_markdown)(result))
    else:
        blocks = [format_columns(load_report.result_facts(result)), format_table(load_report.table_rows(result))]
        if notes := load_report.result_notes(result):
            blocks.append("\n".join(notes))
        out.write("\n\n".join(blocks) + "\n")
    if not result.complete:
        raise KeyboardInterrupt


def _parse_int(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise UsageError(f"{flag} is {text!r}", "give one whole number with --against")
    return int(text)


def _read_words(file: str) -> list[str]:
    words = io.read_text(file).split()
    if not words:
        raise UsageError(f"--text {io.display_name(file)} contains no words", "give another text")
    return words

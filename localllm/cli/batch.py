"""`localllm batch`: answer a file of requests in batches."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from localllm import __version__
from localllm.batch.summary import BatchCounts, BatchSummary
from localllm.cli import options
from localllm.cli.io import StdoutWriter, display_name, note, status, supports_redraw
from localllm.cli.loading import load_model
from localllm.cli.progress import LINE_INTERVAL_S
from localllm.errors import LinesFailed, UsageError
from localllm.files import expand_path
from localllm.formatting import format_rate

if TYPE_CHECKING:
    from localllm.batch.job import Job, OutputStream
    from localllm.llm.llm import LLM

STDIO = "-"
OnBatchProgress = Callable[[BatchCounts], object]


def batch(
    source: Annotated[str, typer.Argument(metavar="IN", hidden=True)],
    model: Annotated[
        str,
        options.option(
            "--model", text="Model that answers the requests.", metavar="MODEL", panel=options.Panel.MODEL
        ),
    ],
    output: Annotated[
        str,
        options.option(
            "-o", "--output", text="Output file; default: stdout.", metavar="OUT", panel=options.Panel.OUTPUT
        ),
    ] = STDIO,
    seed: Annotated[
        int,
        typer.Option(
            help="Base random seed of requests without their own.",
            metavar="N",
            min=0,
            rich_help_panel=options.Panel.SAMPLING,
        ),
    ] = 0,
    max_tokens: Annotated[
        int | None,
        options.option(
            "--max-tokens",
            text="Maximum answer length in tokens, for requests that set none.",
            metavar="N",
            panel=options.Panel.SAMPLING,
        ),
    ] = None,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
    quant: options.Quant = None,
    tensor_parallel: options.TensorParallel = None,
    pipeline_parallel: options.PipelineParallel = None,
    expert_parallel: options.ExpertParallel = False,
    workers: options.Workers = None,
    token_file: options.TokenFile = None,
    no_deterministic: Annotated[
        bool,
        options.switch(
            "--no-deterministic",
            text="Allow faster prefill; answers may depend on the rest of the batch.",
            panel=options.Panel.ADVANCED,
        ),
    ] = False,
    force: options.ForceLoad = False,
    cache_dir: options.CacheDir = None,
    cache_size: options.CacheSize = None,
    as_json: Annotated[
        bool, options.switch("--json", text="Print the summary as one JSON object.", panel=options.Panel.OUTPUT)
    ] = False,
) -> None:
    """Answer a file of requests in batches.

    IN has one request per line in the format of the OpenAI Batch API: custom_id, method, url and body; - is stdin.
    OUT gets one answer per line in the same order; a failed request gets its error. Running the same command again
    resumes an interrupted run and produces the same bytes. Exits with code 9 if any request failed. docs/batch.md
    has the details.
    """
    if as_json and output == STDIO:
        raise UsageError("answers and summary cannot both go to stdout", "name an output file with -o")
    from localllm.batch.job import Job  # imports pydantic

    load_flags = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
    parameters = {"localllm": __version__, "model": model, "seed": seed, "max_tokens": max_tokens, **load_flags}
    parameters["deterministic"] = not no_deterministic
    if tensor_parallel is not None:  # whose sums are rounded otherwise
        parameters["tensor_parallel"] = tensor_parallel
        parameters |= {"expert_parallel": True} if expert_parallel else {}
    with ExitStack() as stack:
        file = stack.enter_context(open_input(source))
        with status(f"reading {display_name(source)}"):
            out = stack.enter_context(closing(open_output(output)))
            job = stack.enter_context(closing(Job(file, out, parameters)))
        if job.nothing_left:
            summary = job.summary(0.0, 0)
        else:
            load_flags |= {"context": job.context if context is None else context}
            deterministic = False if no_deterministic else None  # None: if it is supported
            llm = cast(
                "LLM",
                load_model(
                    model,
                    **load_flags,
                    deterministic=deterministic,
                    force=force,
                    cache_dir=cache_dir,
                    cache_size=cache_size,
                    tensor_parallel=tensor_parallel,
                    pipeline_parallel=pipeline_parallel,
                    expert_parallel=expert_parallel,
                    workers=workers,
                    token_file=token_file,
                ),
            )
            stack.callback(llm.close)
            if not (llm.deterministic or no_deterministic):
                note("note: this model is not deterministic here, so answers may differ between runs")
            summary = run_batch(job, llm, model, max_tokens)
            if renamed := job.counts.other_model_lines:
                note(
                    f"note: {renamed:,} {'line names' if renamed == 1 else 'lines name'} another model, such as "
                    f"{job.counts.other_model:.40}; {model} answered"
                )
    print_summary(summary, as_json=as_json)
    if failed := summary.counts.failed:
        raise LinesFailed(
            f"{failed:,} of {summary.counts.lines:,} requests failed", "the output has the error of each"
        )


def open_input(source: str) -> BinaryIO:
    """Open the requests. Raises UsageError if they cannot be read."""
    if source == STDIO and sys.stdin is not None:
        return sys.stdin.buffer
    try:
        return expand_path(source).open("rb")
    except OSError as error:
        raise UsageError(f"{display_name(source)} cannot be read: {error.strerror}") from error


def open_output(output: str) -> "OutputStream":
    """Output as a resumable file, or as a stream if it is not a regular file. Raises UsageError if it cannot be
    written."""
    from localllm.batch.job import OutputFile, OutputStream, is_stream

    if output == STDIO:
        StdoutWriter()  # raises UsageError if stdout is closed
        return OutputStream(sys.stdout.fileno())
    path = expand_path(output)
    return OutputStream(os.open(path, os.O_WRONLY)) if is_stream(path) else OutputFile(path)


def run_batch(job: "Job", llm: "LLM", model: str, max_tokens: int | None) -> BatchSummary:
    """Answer the remaining requests of a job, and show progress."""
    from localllm.batch.run import BatchRunner

    defaults = dataclasses.replace(llm.default_params, max_tokens=max_tokens)
    names = ("device", "dtype", "kv_dtype", "context", "deterministic")
    fingerprint = job.begin({name: getattr(llm, name) for name in names})
    start = time.monotonic()
    with batch_progress(resumable=job.resumable) as on_progress:
        runner = BatchRunner(
            llm, job.output, job.counts, model=model, defaults=defaults, fingerprint=fingerprint, show=on_progress
        )
        runner.run(job.lines)
        job.check_input()
    return job.summary(time.monotonic() - start, llm.worker.steps)


def print_summary(summary: BatchSummary, *, as_json: bool) -> None:
    if as_json:
        StdoutWriter().write(json.dumps(summary.as_dict()) + "\n")
    else:
        note(str(summary))


@contextmanager
def batch_progress(*, resumable: bool) -> Iterator[OnBatchProgress]:
    """Yield a function that shows the counts after each answer: as a bar on a terminal, in log lines elsewhere.
    resumable: whether an interrupted run can be continued."""
    try:
        if supports_redraw(sys.stderr):
            columns = (TextColumn("answering"), BarColumn(bar_width=None), MofNCompleteColumn())
            speed_columns = (TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True))
            with Progress(*columns, *speed_columns, console=Console(stderr=True), transient=True) as progress:
                yield BatchBar(progress)
        else:
            yield BatchLines()
    except KeyboardInterrupt:
        note("interrupted; run the same command again to resume" if resumable else "interrupted")
        raise


class BatchBar:
    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = progress.add_task("", total=None, speed="")
        self.start = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        speed = format_batch_speed(counts, time.monotonic() - self.start)
        self.progress.update(self.task, total=counts.total, completed=counts.lines, speed=speed)


class BatchLines:
    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_INTERVAL_S:
            self.last = now
            total = "" if counts.total is None else f" of {counts.total:,}"
            note(f"{counts.lines:,}{total} lines, {format_batch_speed(counts, now - self.start)}")


def format_batch_speed(counts: BatchCounts, elapsed_s: float) -> str:
    speed = format_rate(BatchSummary(counts, elapsed_s, 0).tokens_per_s)
    return f"{speed}, {counts.failed:,} failed" if counts.failed else speed

"""`localllm batch`: a file of requests, answered many at once."""

import dataclasses
import json
import os
import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer

from localllm import __version__
from localllm.cli import options
from localllm.cli.io import StdoutWriter, display_name, note, status
from localllm.cli.loading import load_model
from localllm.errors import LinesFailed, UsageError
from localllm.files import expand_path

if TYPE_CHECKING:
    from localllm.batch.job import Job
    from localllm.batch.output import OutputStream
    from localllm.batch.summary import BatchSummary
    from localllm.llm.llm import LLM
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from localllm.batch.summary import BatchCounts, BatchSummary
from localllm.cli.io import supports_redraw
from localllm.cli.progress import LINE_INTERVAL_S
from localllm.formatting import format_rate

# What a person sees of a batch while it runs: a bar on a terminal, else a line now and then. Writes to stderr.
OnBatchProgress = Callable[[BatchCounts], object]


@contextmanager
def batch_progress(*, resumable: bool) -> Iterator[OnBatchProgress]:
    """Gives what is told of each answer. resumable: can a later run begin where this one is broken off?"""
    try:
        if supports_redraw(sys.stderr):
            columns = (TextColumn("answering"), BarColumn(bar_width=None), MofNCompleteColumn())
            told = (TextColumn("{task.fields[told]}"), TimeRemainingColumn(compact=True))
            with Progress(*columns, *told, console=Console(stderr=True), transient=True) as progress:
                yield BatchBar(progress)
        else:
            yield BatchLines()
    except KeyboardInterrupt:
        note("broken off; the same command goes on where it stopped" if resumable else "broken off")
        raise


class BatchBar:
    def __init__(self, progress: Progress):
        self.progress = progress
        self.task = progress.add_task("", total=None, told="")
        self.start = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        told = format_batch_speed(counts, time.monotonic() - self.start)
        self.progress.update(self.task, total=counts.total, completed=counts.lines, told=told)


class BatchLines:
    def __init__(self) -> None:
        self.start = self.last = time.monotonic()

    def __call__(self, counts: BatchCounts) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_INTERVAL_S:
            self.last = now
            of = "" if counts.total is None else f" of {counts.total:,}"
            note(f"{counts.lines:,}{of} lines, {format_batch_speed(counts, now - self.start)}")


def format_batch_speed(counts: BatchCounts, elapsed_s: float) -> str:
    speed = format_rate(BatchSummary(counts, elapsed_s, 0).tokens_per_s)
    return f"{speed}, {counts.failed:,} failed" if counts.failed else speed


STDIO = "-"


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
    no_deterministic: Annotated[
        bool,
        options.switch(
            "--no-deterministic",
            text="Allow faster prefill; answers may depend on the rest of the batch.",
            panel=options.Panel.ADVANCED,
        ),
    ] = False,
    force: Annotated[
        bool,
        options.switch(
            "--force", text="Load the model even if it does not fit into free memory.", panel=options.Panel.LOADING
        ),
    ] = False,
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
        raise UsageError("the answers and the summary cannot both go to stdout", "name a file by -o")
    from localllm.batch.job import Job  # pydantic: 0.1 s that other commands need not wait for

    where = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quant": quant, "context": context}
    asked = {"localllm": __version__, "model": model, "seed": seed, "max_tokens": max_tokens, **where}
    asked["deterministic"] = not no_deterministic
    with ExitStack() as undo:
        file = undo.enter_context(open_input(source))
        with status(f"reading {display_name(source)}"):
            out = undo.enter_context(closing(open_output(output)))
            job = undo.enter_context(closing(Job(file, out, asked)))
        if job.nothing_left:
            summary = job.summary(0.0, 0)
        else:
            where |= {"context": job.context if context is None else context}
            deterministic = False if no_deterministic else None  # None: where that holds
            llm = cast("LLM", load_model(model, **where, deterministic=deterministic, force=force))
            undo.callback(llm.close)
            if not (llm.deterministic or no_deterministic):
                note("note: not deterministic here: where two tokens are nearly equally likely, runs may differ")
            summary = run_batch(job, llm, model, max_tokens)
            if renamed := job.counts.other_model_lines:
                note(
                    f"note: {renamed:,} lines ask for another model, say {job.counts.other_model:.40}; "
                    f"{model} answered"
                )
    print_summary(summary, as_json=as_json)
    if failed := summary.counts.failed:
        lines = f"{failed:,} of {summary.counts.lines:,} lines have failed"
        raise LinesFailed(lines, "their answers say why")


def open_input(source: str) -> BinaryIO:
    """Raises UsageError where there is nothing to read."""
    if source == STDIO and sys.stdin is not None:
        return sys.stdin.buffer
    try:
        return expand_path(source).open("rb")
    except OSError as error:
        raise UsageError(f"{display_name(source)} cannot be read: {error.strerror}") from error


def open_output(output: str) -> "OutputStream":
    """A file, or a stream where it is no file. Raises UsageError where nothing can be written there."""
    from localllm.batch.output import OutputFile, OutputStream, is_stream

    if output == STDIO:
        StdoutWriter()  # raises UsageError where it is closed
        return OutputStream(sys.stdout.fileno())
    path = expand_path(output)
    return OutputStream(os.open(path, os.O_WRONLY)) if is_stream(path) else OutputFile(path)


def run_batch(job: "Job", llm: "LLM", model: str, max_tokens: int | None) -> "BatchSummary":
    from localllm.batch.run import BatchRunner

    pass

    defaults = dataclasses.replace(llm.default_params, max_tokens=max_tokens)
    names = ("device", "dtype", "kv_dtype", "context", "deterministic")
    fingerprint = job.begin({name: getattr(llm, name) for name in names})
    start = time.monotonic()
    with batch_progress(resumable=job.resumable) as show:
        batch = BatchRunner(
            llm, job.output, job.counts, model=model, defaults=defaults, fingerprint=fingerprint, show=show
        )
        batch.run(job.lines)
        job.check_input()
    return job.summary(time.monotonic() - start, llm.worker.steps)


def print_summary(summary: "BatchSummary", *, as_json: bool) -> None:
    if as_json:
        StdoutWriter().write(json.dumps(summary.as_dict()) + "\n")
    else:
        note(str(summary))

"""`localllm embed`: texts to vectors, one JSON array a line."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, is_terminal, note
from localllm.cli.loading import load_embedding_model
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.llm.embedding_inputs import Embeddings

LINES_PER_BATCH = 256  # of stdin that are embedded together


def embed(
    model: options.ModelName,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", hidden=True)] = None,
    dimensions: Annotated[
        int | None, options.option(text="Truncate vectors to N dimensions and normalize them again.", metavar="N")
    ] = None,
    prompt: Annotated[
        str | None, options.option(text="Name of the model's own prompt to prepend to each text.", metavar="NAME")
    ] = None,
    truncate: Annotated[
        bool, options.switch("--truncate", text="Truncate texts that are too long, with a note on stderr.")
    ] = False,
    as_json: Annotated[
        bool,
        options.switch(
            "--json", text="Print one JSON object per line, with token counts.", panel=options.Panel.OUTPUT
        ),
    ] = False,
    context: Annotated[
        int | None,
        options.option(
            text="Maximum text length in tokens; default: the trained length.",
            metavar="TOKENS",
            panel=options.Panel.LOADING,
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    force: Annotated[
        bool,
        options.switch(
            "--force", text="Load the model even if it does not fit into free memory.", panel=options.Panel.LOADING
        ),
    ] = False,
) -> None:
    """Compute embedding vectors of texts.

    MODEL is an embedding model, or any model that runs: ORG/REPO, or the path of a folder or a GGUF file; a model
    that is not on this machine is downloaded first. Each TEXT, or each line of stdin without TEXT, gives one line
    on stdout: a JSON array of numbers, normalized to unit length.
    """
    if not texts and is_terminal(sys.stdin):
        raise UsageError("there is nothing to embed", "give texts after the model's name, or pipe lines in")
    out = StdoutWriter()
    given = iter(texts) if texts else read_lines()
    first = next(given, None)
    if first is None:
        raise UsageError("there is nothing to embed", "stdin is empty")
    with closing(load_embedding_model(model, device=device, dtype=dtype, context=context, force=force)) as embeds:
        done = 0
        every = chain([first], given)
        while some := list(islice(every, LINES_PER_BATCH)):
            found = embeds.embed(some, dimensions=dimensions, prompt=prompt, truncate=truncate)
            print_embeddings(found, out, done, as_json=as_json)
            done += len(some)


def read_lines() -> Iterator[str]:
    """Of stdin, as they come. Raises UsageError for one that is empty or no UTF-8."""
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(
                f"line {number} of stdin is not valid UTF-8", "convert it first: `iconv -f latin1 -t utf-8`"
            ) from None
        if not text.strip():
            raise UsageError(f"line {number} of stdin is empty", "leave it out")
        yield text


def print_embeddings(found: "Embeddings", out: StdoutWriter, done: int, *, as_json: bool) -> None:
    """done: texts before these."""
    entries = zip(found.vectors.tolist(), found.tokens, found.left_out, strict=True)
    for number, (vector, tokens, left_out) in enumerate(entries, done):
        about: dict[str, Any] = {"index": number, "tokens": tokens, "truncated": left_out, "embedding": vector}
        out.write(json.dumps(about if as_json else vector) + "\n")
        if left_out:
            note(f"note: text {number + 1} was cut, {left_out} tokens are left out")

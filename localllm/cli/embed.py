"""`localllm embed`: embedding vectors of texts, one JSON array per line."""

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

LINES_PER_BATCH = 256  # texts that are embedded together


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
    force: options.ForceLoad = False,
) -> None:
    """Compute embedding vectors of texts.

    MODEL is an embedding model, or any model that runs: ORG/REPO, or the path of a folder or a GGUF file; a model
    that is not on this machine is downloaded first. Each TEXT, or each line of stdin without TEXT, gives one line
    on stdout: a JSON array of numbers, normalized to unit length.
    """
    if not texts and is_terminal(sys.stdin):
        raise UsageError("no texts are given", "give texts after the name of the model, or pipe lines in")
    out = StdoutWriter()
    inputs = iter(texts) if texts else _read_lines()
    first = next(inputs, None)
    if first is None:  # checked before the model is loaded
        raise UsageError(
            "no texts are given and stdin is empty", "give texts after the name of the model, or pipe lines in"
        )
    with closing(
        load_embedding_model(model, device=device, dtype=dtype, context=context, force=force)
    ) as embedder:
        start, inputs = 0, chain([first], inputs)
        while batch := list(islice(inputs, LINES_PER_BATCH)):
            embeddings = embedder.embed(batch, dimensions=dimensions, prompt=prompt, truncate=truncate)
            _print_embeddings(embeddings, out, start, as_json=as_json)
            start += len(batch)


def _read_lines() -> Iterator[str]:
    """Lines of stdin as they arrive. Raises UsageError for one that is empty or not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(
                f"line {number} of stdin is not valid UTF-8", "convert it first: `iconv -f latin1 -t utf-8`"
            ) from None
        if not text.strip():
            raise UsageError(f"line {number} of stdin is empty", "remove it")
        yield text


def _print_embeddings(embeddings: "Embeddings", out: StdoutWriter, start: int, *, as_json: bool) -> None:
    """start: index of the first text."""
    entries = zip(embeddings.vectors.tolist(), embeddings.tokens, embeddings.left_out, strict=True)
    for index, (vector, tokens, truncated) in enumerate(entries, start):
        entry: dict[str, Any] = {"index": index, "tokens": tokens, "truncated": truncated, "embedding": vector}
        out.write(json.dumps(entry if as_json else vector) + "\n")
        if truncated:
            note(f"note: text {index + 1} was truncated by {truncated} tokens")

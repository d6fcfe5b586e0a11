"""`localllm diff`: how far one model is from another."""

import json
from typing import Annotated

import typer

from localllm.cli import io, options
from localllm.cli.io import StdoutWriter, note, status
from localllm.cli.loading import fetch_missing
from localllm.cli.quality_page import format_quality
from localllm.quality.report import as_dict
from localllm.quality.text import EVALUATION_NAME, MAX_TOKENS, WINDOW_TOKENS
from localllm.settings import Settings


def diff(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", hidden=True)],
    other: Annotated[str, typer.Argument(metavar="OTHER", hidden=True)],
    text: Annotated[
        str | None, options.option("--text", text="Measure on this text; - is stdin.", metavar="FILE")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of the text, at most.", metavar="N", min=1)] = MAX_TOKENS,
    window: Annotated[
        int | None,
        options.option("--window", text=f"Tokens that are seen at once, else {WINDOW_TOKENS}.", metavar="N"),
    ] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    dtype_b: Annotated[
        str | None, options.option("--dtype-b", text="The same of OTHER, if it is another.", metavar="DTYPE")
    ] = None,
    kv_dtype: options.KVDType = None,
    kv_dtype_b: Annotated[
        str | None, options.option("--kv-dtype-b", text="The same of OTHER, if it is another.", metavar="KV")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure how far one model is from another.

    REFERENCE and OTHER are models of one tokenizer, a model and what was quantized from it, say, each a name of
    `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Both read a text, of the project's own
    unless one is named: perplexity, KL divergence, how often their likeliest tokens agree, the layers' outputs,
    greedy answers and the speed of one run are told. docs/quality.md explains each number.
    """
    out = StdoutWriter()
    settings = Settings.from_environment()
    content, text_name = (None, EVALUATION_NAME) if text is None else (io.read_text(text), io.display_name(text))
    for name, kind, kept in ((reference, dtype, kv_dtype), (other, dtype_b or dtype, kv_dtype_b or kv_dtype)):
        fetch_missing(name, settings, device=device, dtype=kind, kv_dtype=kept, context=window)
    with status(f"comparing {other} with {reference}"):
        from localllm.comparison.compare import compare_models
        from localllm.comparison.subject import find_subject

        quality = compare_models(
            find_subject(reference, settings, device=device, dtype=dtype, kv_dtype=kv_dtype),
            find_subject(other, settings, device=device, dtype=dtype_b or dtype, kv_dtype=kv_dtype_b or kv_dtype),
            settings,
            content,
            text_name=text_name,
            window=window,
            tokens=tokens,
            note=note,
        )
    out.write((json.dumps(as_dict(quality), indent=1) if as_json else format_quality(quality)) + "\n")

"""`localllm diff`: measure how much two models differ."""

import json
from dataclasses import replace
from typing import Annotated

import typer

from localllm.cli import io, options
from localllm.cli.io import StdoutWriter, note, status
from localllm.cli.loading import parse_load_options, resolve_for
from localllm.cli.quality_page import format_quality
from localllm.quality.report import as_dict
from localllm.quality.text import EVALUATION_NAME, MAX_TOKENS, WINDOW_TOKENS
from localllm.settings import Settings


def diff(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", hidden=True)],
    other: Annotated[str, typer.Argument(metavar="OTHER", hidden=True)],
    text: Annotated[
        str | None,
        options.option("--text", text="Evaluation text; - is stdin; default: the bundled text.", metavar="FILE"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of the text to evaluate.", metavar="N", min=1)
    ] = MAX_TOKENS,
    window: Annotated[
        int | None,
        options.option("--window", text=f"Window length in tokens; default: {WINDOW_TOKENS}.", metavar="N"),
    ] = None,
    device: options.Device = None,
    dtype: options.DType = None,
    dtype_b: Annotated[
        str | None,
        options.option(
            "--dtype-b",
            text="Data type of the weights of OTHER; default: --dtype.",
            metavar="DTYPE",
            panel=options.Panel.LOADING,
            choices=options.DTYPES,
        ),
    ] = None,
    kv_dtype: options.KVDType = None,
    kv_dtype_b: Annotated[
        str | None,
        options.option(
            "--kv-dtype-b",
            text="Data type of the KV cache of OTHER; default: --kv-dtype.",
            metavar="KV",
            panel=options.Panel.LOADING,
            choices=options.KV_DTYPES,
        ),
    ] = None,
    activations: options.Activations = None,
    activations_b: Annotated[
        str | None,
        options.option(
            "--activations-b",
            text="Bits of activations of OTHER; default: --activations.",
            metavar="BITS",
            panel=options.Panel.LOADING,
            choices=options.ACTIVATION_BITS,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure how much two models differ.

    REFERENCE and OTHER are models with the same tokenizer, such as a model and its quantization; each is a name of
    `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Both are evaluated on the same text:
    perplexity, KL divergence, top-token agreement, layer outputs, greedy answers and speed. docs/quality.md
    explains each number.
    """
    out = StdoutWriter()
    settings = Settings.from_environment()
    content, text_name = (None, EVALUATION_NAME) if text is None else (io.read_text(text), io.display_name(text))
    load_options = parse_load_options(settings, context=window, dtype=dtype, kv_dtype=kv_dtype)
    other_options = parse_load_options(
        settings, context=window, dtype=dtype_b or dtype, kv_dtype=kv_dtype_b or kv_dtype
    )
    settings = replace(settings, activations=activations or settings.activations)
    other_activations = activations_b or settings.activations
    # Both are downloaded before torch is imported.
    resolve_for(load_options, reference, settings, device=device)
    resolve_for(other_options, other, settings, device=device)
    with status(f"comparing {other} with {reference}"):
        from localllm.comparison.compare import compare_models
        from localllm.comparison.subject import find_subject

        quality = compare_models(
            find_subject(reference, settings, device=device, options=load_options),
            find_subject(
                other, replace(settings, activations=other_activations), device=device, options=other_options
            ),
            settings,
            content,
            text_name=text_name,
            window=window,
            tokens=tokens,
            note=note,
        )
    out.write((json.dumps(as_dict(quality), indent=1) if as_json else format_quality(quality)) + "\n")

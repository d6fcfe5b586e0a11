"""`localllm bench`: how fast models are on this machine, and what they wait for."""

from collections.abc import Sequence
from typing import Annotated

import typer

from localllm.benchmark.scenario import Asked, numbers
from localllm.cli import io, options
from localllm.cli.io import AnswerWriter
from localllm.cli.loading import fetch_missing, quantize_missing
from localllm.cli.progress import saying
from localllm.errors import UsageError
from localllm.plan.weights import QUANTS
from localllm.settings import Settings

ROUNDS = 5
AS_STORED = "none"


def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", hidden=True)],
    prompt: Annotated[
        str | None, options.option("--prompt", text="Tokens of new prompts, else 512.", metavar="N,...")
    ] = None,
    depth: Annotated[
        str | None, options.option("--depth", text="Tokens before them, in the cache, else 0.", metavar="N,...")
    ] = None,
    batch: Annotated[
        str | None, options.option("--batch", text="Streams that are answered at once, else 1.", metavar="N,...")
    ] = None,
    output: Annotated[
        str | None, options.option("--output", text="Tokens of each answer, else 32.", metavar="N,...")
    ] = None,
    quant: Annotated[
        str | None, options.option("--quant", text="Editions: none, int8, int4.", metavar="QUANT,...")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Rounds, after one to warm up.", metavar="N", min=1)] = ROUNDS,
    text: Annotated[
        str | None, options.option("--text", text="Cut prompts from this text, not random tokens.", metavar="FILE")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.", metavar="N")] = 0,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_dtype: options.KVDType = None,
) -> None:
    """Measure how fast a model is on this machine, and what it waits for.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. Flags with N,...
    take lists, 128,512 say, and each is measured with each. docs/bench.md explains every number.
    """
    out = AnswerWriter()
    asked = Asked(
        numbers(prompt, "--prompt"),
        numbers(depth, "--depth", 0) or (0,),
        numbers(batch, "--batch") or (1,),
        numbers(output, "--output"),
    )
    [model], quants = models, quants_of(quant)
    settings = Settings.from_environment()
    content = None if text is None else io.read_text(text)
    for each in quants:
        prepare(model, each, settings, device=device, dtype=dtype, kv_dtype=kv_dtype)
    with saying() as say:
        from localllm.benchmark.run import RANDOM, Plan, edition_of, run

        plan = Plan(asked, repeat, seed, content, RANDOM if text is None else io.called(text))
        editions = [
            edition_of(model, each, settings, device=device, dtype=dtype, kv_dtype=kv_dtype) for each in quants
        ]
        result = run(editions, plan, say)
        from localllm.cli.bench_page import page

    out.write(page(result) + "\n")


def quants_of(text: str | None) -> Sequence[str | None]:
    """`none,int8` as names. Raises UsageError for one that is not known."""
    words = [word.strip() for word in (text or AS_STORED).split(",")]
    unknown = next((word for word in words if word not in (AS_STORED, *QUANTS)), None)
    if unknown is not None:
        raise UsageError(f"--quant holds {unknown!r}", f"name {AS_STORED}, {' or '.join(QUANTS)}")
    return [None if word == AS_STORED else word for word in dict.fromkeys(words)]


def prepare(
    model: str,
    quant: str | None,
    settings: Settings,
    *,
    device: str | None,
    dtype: str | None,
    kv_dtype: str | None,
) -> None:
    """Pull and quantize what is not here."""
    fetch_missing(model, settings, device=device, dtype=dtype, context=None, kv_dtype=kv_dtype, quant=quant)
    if quant:
        quantize_missing(model, quant, settings)

"""`localllm quantize`: a model in fewer bits, as a folder that others read or a GGUF file, and what that cost."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.arch.describe import describe
from localllm.checkpoint.header import Header, read_header
from localllm.cli import io, options, progress, quality_page
from localllm.cli.io import AnswerWriter, note, status
from localllm.errors import DoesNotFit, UsageError
from localllm.hub.resolve import ModelRef, resolve
from localllm.paths import expanded
from localllm.quality.report import Quality, as_dict
from localllm.quality.text import EVALUATION_NAME, WINDOW, windows_of
from localllm.quant.recipe import METHODS, Method, Recipe
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.quantize.states import Outcome

NAMED = 3  # matrices in a note
GROUP = 128  # columns, for INT4 where nobody asks for another
OF_FOLDERS = ("method", "bits", "group", "asymmetric", "activations", "calib")  # flags that GGUF knows nothing of


def quantize(
    ctx: typer.Context,
    model: options.ModelName,
    output: Annotated[str, typer.Option("-o", "--output", help="The folder or file to write.", metavar="PATH")],
    method: Annotated[
        str | None, options.option("--method", text=f"{', '.join(METHODS)}; else gptq.", metavar="METHOD")
    ] = None,
    bits: Annotated[
        int | None, options.option("--bits", text="4 or 8; else 4, or 8 with --activations.", metavar="N")
    ] = None,
    group: Annotated[
        int | None,
        options.option(
            "--group", text="Columns that share a scale: 128, 64, 32, or 0 for a whole row.", metavar="N"
        ),
    ] = None,
    asymmetric: Annotated[bool, options.switch("--asymmetric", text="Give each group a zero point.")] = False,
    activations: Annotated[
        str | None, options.option("--activations", text="int8: round activations, too.", metavar="TYPE")
    ] = None,
    calib: Annotated[
        str | None,
        options.option("--calib", text="Calibrate on this text, else on the project's own.", metavar="FILE"),
    ] = None,
    evaluation: Annotated[
        str | None,
        options.option("--eval", text="Measure on this text, else on the project's own.", metavar="FILE"),
    ] = None,
    to: Annotated[
        str | None, options.option("--to", text="gguf: one file that llama.cpp runs.", metavar="FORMAT")
    ] = None,
    type: Annotated[
        str | None, options.option("--type", text="With --to gguf: q4_0 or q8_0.", metavar="TYPE")
    ] = None,
    force: Annotated[
        bool, options.switch("--force", text="Replace what an earlier run has written or begun.")
    ] = False,
    as_json: options.JsonEvents = False,
) -> None:
    """Quantize a model.

    MODEL is a name of `localllm list`, ORG/REPO, or the path of a folder, in safetensors and not quantized. Writes
    a folder in the layout of compressed-tensors, or a GGUF file, then measures what was lost and keeps that in the
    folder. Works through the model layer by layer; a run that was broken off goes on where it stopped. stdout gets
    the report and the path.
    """
    out = AnswerWriter()
    target = target_of(output)
    recipe = None if to else recipe_of(method, bits, group, asymmetric=asymmetric, activations=activations)
    if to:
        check_gguf(to, {name: ctx.params[name] for name in OF_FOLDERS})
    elif type:
        raise UsageError("--type is for --to gguf", "leave it out, or say --bits")
    if calib and recipe and recipe.method == "rtn":
        raise UsageError("rtn needs no calibration text", "leave out --calib, or name another --method")
    if calib == evaluation == "-":
        raise UsageError("--calib and --eval cannot both be stdin", "give one of them as a file")
    calibration = io.read_text(calib) if calib else None
    text, text_name = (io.read_text(evaluation), io.called(evaluation)) if evaluation else (None, EVALUATION_NAME)
    ref = resolve(model)
    header = read_header(ref.path)
    if text is not None:
        check_evaluation(ref, header, text)
    with progress.parts(as_json=as_json, goes_on=recipe is not None) as show:
        if recipe is None:
            errors: dict[str, float] = {}
            to_gguf(header, type or "q8_0", target, show, force=force)
        else:
            outcome = to_folder(header, recipe, target, calibration, show, force=force)
            errors = outcome.errors
            if outcome.rounded:
                note(hardly_reached(outcome.rounded))
    quality = measured(model, target, recipe, errors, text, text_name)
    if as_json:
        show.write("done", path=str(target), quality=as_dict(quality) if quality else None)
        return
    out.write(f"{quality_page.text_of(quality)}\n\n" if quality else "")
    out.write(f"{target}\n")


def target_of(output: str) -> Path:
    """Raises UsageError for a path that ends in no name, beside which nothing can be begun."""
    target = expanded(output)
    if target.name in ("", ".."):
        raise UsageError(f"{output!r} is no name for what is to be written", "write for example -o model-int4")
    return target


def check_evaluation(ref: ModelRef, header: Header, text: str) -> None:
    """Raises UsageError for a text that is too short: before hours of work, not after them."""
    windows_of(text, Tokenizer.from_folder(ref.path), window=min(WINDOW, describe(header.config).max_context))


def hardly_reached(matrices: Sequence[str]) -> str:
    """Names the matrices of experts that too few calibration tokens reached, or some of them."""
    named = ", ".join(matrices[:NAMED]) + (", ..." if len(matrices) > NAMED else "")
    return (
        f"note: {len(matrices)} matrices of experts were rounded to nearest, as too few calibration tokens "
        f"reached them: {named}"
    )


def recipe_of(
    method: str | None, bits: int | None, group: int | None, *, asymmetric: bool, activations: str | None
) -> Recipe:
    """Raises UsageError for words that mean nothing; what contradicts itself the quantizer refuses."""
    if activations not in (None, "int8"):
        raise UsageError(f"activations cannot be {activations!r}", "say --activations int8, or leave it out")
    rounded = activations is not None or method == "smoothquant"
    named = method or ("smoothquant" if rounded else "gptq")
    known: Method | None = next((known for known in METHODS if known == named), None)
    if known is None:
        raise UsageError(f"there is no method {named!r}", f"name one of {', '.join(METHODS)}")
    bits = (8 if rounded else 4) if bits is None else bits
    columns = (GROUP if bits == 4 else 0) if group is None else group
    return Recipe(known, bits, columns or None, symmetric=not asymmetric, activations=rounded)


def check_gguf(to: str, flags: dict[str, Any]) -> None:
    if to != "gguf":
        raise UsageError(f"there is no format {to!r} to write", "say --to gguf, or leave it out for a folder")
    given = next((name for name, value in flags.items() if value not in (None, False)), None)
    if given:
        raise UsageError(f"--{given} is for folders, and GGUF has types", "say --type q4_0 or q8_0")


def to_folder(
    header: Header, recipe: Recipe, target: Path, text: str | None, show: progress.Parts, *, force: bool
) -> "Outcome":
    from localllm.quantize.check import check_recipe  # from here on with torch
    from localllm.quantize.expected import check_groups
    from localllm.quantize.make import make
    from localllm.quantize.source import check_source

    check_source(header)
    check_recipe(recipe)
    check_groups(header, recipe)
    return make(header, recipe, target, show.part, text=text, force=force)


def to_gguf(header: Header, type: str, target: Path, show: progress.Parts, *, force: bool) -> None:
    from localllm.quantize.gguf_file import write_gguf

    write_gguf(header, type, target, show.part, force=force)


def measured(
    model: str, target: Path, recipe: Recipe | None, errors: dict[str, float], text: str | None, text_name: str
) -> Quality | None:
    """How far the result is from its source, kept beside its weights; None where memory does not hold it."""
    from localllm.comparison.compare import compare
    from localllm.comparison.subject import subject
    from localllm.quality.report import Error, write

    settings = Settings.from_environment()
    with status("measuring what was lost"):
        try:
            found = compare(
                subject(model, settings),
                subject(str(target.absolute()), settings),
                settings,
                text,
                text_name=text_name,
                note=note,
            )
        except DoesNotFit as error:
            note(f"note: nothing was measured: {error}")
            return None
        except KeyboardInterrupt:
            note(f"{target} is whole, and was not measured: `localllm diff {model} {target}` does that")
            raise
    if recipe is None:
        return found
    worst = sorted(errors.items(), key=lambda item: -item[1])
    found = dataclasses.replace(
        found, recipe=dataclasses.asdict(recipe), matrices=tuple(Error(name, error) for name, error in worst)
    )
    write(found, target)
    return found

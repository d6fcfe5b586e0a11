"""`localllm quantize`: a model in fewer bits, as a folder that others read or a GGUF file, and what that cost."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.cli import io, options, progress, quality_page
from localllm.cli.io import StdoutWriter, note, status
from localllm.errors import DoesNotFit, UsageError
from localllm.files import expand_path
from localllm.hub.resolve import ModelRef, resolve_model
from localllm.quality.report import Quality, as_dict
from localllm.quality.text import EVALUATION_NAME, WINDOW_TOKENS, split_into_windows
from localllm.quantize.source import METHODS, Method, Recipe
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.quantize.states import QuantizationResult

MAX_NAMED_MATRICES = 3  # matrices in a note
DEFAULT_GROUP = 128  # columns, for INT4 where nobody asks for another
FOLDER_FLAGS = (
    "method",
    "bits",
    "group",
    "asymmetric",
    "activations",
    "calib",
)  # flags that GGUF knows nothing of


def quantize(
    ctx: typer.Context,
    model: options.ModelName,
    output: Annotated[str, typer.Option("-o", "--output", help="Folder or file to write.", metavar="PATH")],
    method: Annotated[
        str | None,
        options.option(
            "--method", text=f"Quantization method: {', '.join(METHODS)}; default: gptq.", metavar="METHOD"
        ),
    ] = None,
    bits: Annotated[
        int | None,
        options.option(
            "--bits", text="Bits per weight: 4 or 8; default: 4, or 8 with --activations.", metavar="N"
        ),
    ] = None,
    group: Annotated[
        int | None,
        options.option("--group", text="Group size: 128, 64, 32, or 0 for one scale per row.", metavar="N"),
    ] = None,
    asymmetric: Annotated[
        bool, options.switch("--asymmetric", text="Use asymmetric quantization, with a zero point per group.")
    ] = False,
    activations: Annotated[
        str | None, options.option("--activations", text="Quantize activations too: int8.", metavar="TYPE")
    ] = None,
    calib: Annotated[
        str | None,
        options.option("--calib", text="Calibration text; default: the bundled text.", metavar="FILE"),
    ] = None,
    evaluation: Annotated[
        str | None,
        options.option("--eval", text="Evaluation text; default: the bundled text.", metavar="FILE"),
    ] = None,
    to: Annotated[
        str | None,
        options.option("--to", text="Output format: gguf, a single file for llama.cpp.", metavar="FORMAT"),
    ] = None,
    type: Annotated[
        str | None,
        options.option("--type", text="With --to gguf: quantization type, q4_0 or q8_0.", metavar="TYPE"),
    ] = None,
    force: Annotated[bool, options.switch("--force", text="Overwrite existing or partial output.")] = False,
    as_json: options.JsonEvents = False,
) -> None:
    """Quantize a model and measure the loss of quality.

    MODEL is a name of `localllm list`, ORG/REPO, or the path of a folder; it must be unquantized safetensors.
    Writes a folder in the compressed-tensors format, or a GGUF file, then measures the loss and stores the report
    in the folder. Works layer by layer; an interrupted run resumes. stdout gets the report and the path.
    """
    out = StdoutWriter()
    target = resolve_target(output)
    recipe = None if to else build_recipe(method, bits, group, asymmetric=asymmetric, activations=activations)
    if to:
        check_gguf_flags(to, {name: ctx.params[name] for name in FOLDER_FLAGS})
    elif type:
        raise UsageError("--type is for --to gguf", "leave it out, or say --bits")
    if calib and recipe and recipe.method == "rtn":
        raise UsageError("rtn needs no calibration text", "leave out --calib, or name another --method")
    if calib == evaluation == "-":
        raise UsageError("--calib and --eval cannot both be stdin", "give one of them as a file")
    calibration = io.read_text(calib) if calib else None
    text, text_name = (
        (io.read_text(evaluation), io.display_name(evaluation)) if evaluation else (None, EVALUATION_NAME)
    )
    ref = resolve_model(model)
    header = read_header(ref.path)
    if text is not None:
        check_evaluation_text(ref, header, text)
    with progress.quantize_progress(as_json=as_json, resumable=recipe is not None) as show:
        if recipe is None:
            errors: dict[str, float] = {}
            quantize_to_gguf(header, type or "q8_0", target, show, force=force)
        else:
            outcome = quantize_to_folder(header, recipe, target, calibration, show, force=force)
            errors = outcome.errors
            if outcome.rounded:
                note(describe_unreached_matrices(outcome.rounded))
    quality = measure_quality(model, target, recipe, errors, text, text_name)
    if as_json:
        show.write("done", path=str(target), quality=as_dict(quality) if quality else None)
        return
    out.write(f"{quality_page.format_quality(quality)}\n\n" if quality else "")
    out.write(f"{target}\n")


def resolve_target(output: str) -> Path:
    """Raises UsageError for a path that ends in no name, beside which nothing can be begun."""
    target = expand_path(output)
    if target.name in ("", ".."):
        raise UsageError(f"{output!r} is no name for what is to be written", "write for example -o model-int4")
    return target


def check_evaluation_text(ref: ModelRef, header: Header, text: str) -> None:
    """Raises UsageError for a text that is too short: before hours of work, not after them."""
    split_into_windows(
        text, Tokenizer.from_folder(ref.path), window=min(WINDOW_TOKENS, parse_config(header.config).max_context)
    )


def describe_unreached_matrices(matrices: Sequence[str]) -> str:
    """Names the matrices of experts that too few calibration tokens reached, or some of them."""
    named = ", ".join(matrices[:MAX_NAMED_MATRICES]) + (", ..." if len(matrices) > MAX_NAMED_MATRICES else "")
    return (
        f"note: {len(matrices)} matrices of experts were rounded to nearest, as too few calibration tokens "
        f"reached them: {named}"
    )


def build_recipe(
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
    columns = (DEFAULT_GROUP if bits == 4 else 0) if group is None else group
    # transformers dequantizes a folder by one scheme: the head has that of INT8 layers, or is not quantized.
    head_bits = 8 if bits == 8 and not rounded else 16
    return Recipe(known, bits, columns or None, symmetric=not asymmetric, activations=rounded, head_bits=head_bits)


def check_gguf_flags(to: str, flags: dict[str, Any]) -> None:
    if to != "gguf":
        raise UsageError(f"there is no format {to!r} to write", "say --to gguf, or leave it out for a folder")
    given = next((name for name, value in flags.items() if value not in (None, False)), None)
    if given:
        raise UsageError(f"--{given} is for folders, and GGUF has types", "say --type q4_0 or q8_0")


def quantize_to_folder(
    header: Header, recipe: Recipe, target: Path, text: str | None, show: progress.QuantizeProgress, *, force: bool
) -> "QuantizationResult":
    from localllm.quantize.check import (
        check_group_size,
        check_recipe,  # from here on with torch
    )
    from localllm.quantize.quantizer import make_artefact
    from localllm.quantize.source import check_source

    check_source(header)
    check_recipe(recipe)
    check_group_size(header, recipe)
    return make_artefact(header, recipe, target, show.part, text=text, force=force)


def quantize_to_gguf(
    header: Header, type: str, target: Path, show: progress.QuantizeProgress, *, force: bool
) -> None:
    from localllm.quantize.gguf_file import write_gguf

    write_gguf(header, type, target, show.part, force=force)


def measure_quality(
    model: str, target: Path, recipe: Recipe | None, errors: dict[str, float], text: str | None, text_name: str
) -> Quality | None:
    """How far the result is from its source, kept beside its weights; None where memory does not hold it."""
    from localllm.comparison.compare import compare_models
    from localllm.comparison.subject import find_subject
    from localllm.quality.report import Error, write_report

    settings = Settings.from_environment()
    with status("measuring what was lost"):
        try:
            found = compare_models(
                find_subject(model, settings),
                find_subject(str(target.absolute()), settings),
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
    write_report(found, target)
    return found

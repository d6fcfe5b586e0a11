"""`localllm quantize`: write a quantized model as a folder or a GGUF file, and measure the loss of quality."""

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

MAX_NAMED_MATRICES = 3  # in a note
DEFAULT_GROUP = 128  # columns per scale of INT4
FOLDER_FIELDS = ("method", "bits", "group", "asymmetric", "activations", "calib")  # flags that --to gguf excludes


def quantize(
    ctx: typer.Context,
    model: options.ModelName,
    output: Annotated[str, typer.Option("-o", "--output", help="Folder or file to write.", metavar="PATH")],
    method: Annotated[
        str | None,
        options.option(
            "--method",
            text=f"Quantization method: {', '.join(METHODS)}; default: gptq.",
            metavar="METHOD",
            choices=METHODS,
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
        str | None,
        options.option("--activations", text="Quantize activations too: int8.", metavar="TYPE", choices=("int8",)),
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
        options.option(
            "--to", text="Output format: gguf, a single file for llama.cpp.", metavar="FORMAT", choices=("gguf",)
        ),
    ] = None,
    type: Annotated[
        str | None,
        options.option(
            "--type",
            text="With --to gguf: quantization type, q4_0 or q8_0.",
            metavar="TYPE",
            choices=("q4_0", "q8_0"),
        ),
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
        check_gguf_flags(to, {name: ctx.params[name] for name in FOLDER_FIELDS})
    elif type:
        raise UsageError("--type applies only to --to gguf", "leave it out, or give --bits")
    if calib and recipe and recipe.method == "rtn":
        raise UsageError("--method rtn uses no calibration text", "leave out --calib, or choose another --method")
    if calib == evaluation == "-":
        raise UsageError("--calib and --eval cannot both be stdin", "give a file for one of them")
    calibration = io.read_text(calib) if calib else None
    text, text_name = None, EVALUATION_NAME
    if evaluation:
        text, text_name = io.read_text(evaluation), io.display_name(evaluation)
    ref = resolve_model(model)
    header = read_header(ref.path)
    if text is not None:
        check_evaluation_text(ref, header, text)
    with progress.quantize_progress(as_json=as_json, resumable=recipe is not None) as display:
        if recipe is None:
            errors: dict[str, float] = {}
            quantize_to_gguf(header, type or "q8_0", target, display, force=force)
        else:
            result = quantize_to_folder(header, recipe, target, calibration, display, force=force)
            errors = result.errors
            if result.rounded:
                note(describe_unreached_matrices(result.rounded))
    quality = measure_quality(model, target, recipe, errors, text, text_name)
    if as_json:
        display.write("done", path=str(target), quality=as_dict(quality) if quality else None)
        return
    out.write(f"{quality_page.format_quality(quality)}\n\n" if quality else "")
    out.write(f"{target}\n")


def resolve_target(output: str) -> Path:
    """Path of the output. Raises UsageError for a path without a file name, such as `/` or `..`."""
    target = expand_path(output)
    if target.name in ("", ".."):
        raise UsageError(f"--output {output!r} has no file name", "write for example -o model-int4")
    return target


def check_evaluation_text(ref: ModelRef, header: Header, text: str) -> None:
    """Raises UsageError for a text that is too short, before hours of quantization."""
    split_into_windows(
        text, Tokenizer.from_folder(ref.path), window=min(WINDOW_TOKENS, parse_config(header.config).max_context)
    )


def describe_unreached_matrices(matrices: Sequence[str]) -> str:
    """Note that names some of the expert matrices that too few calibration tokens reached."""
    names = ", ".join(matrices[:MAX_NAMED_MATRICES]) + (", ..." if len(matrices) > MAX_NAMED_MATRICES else "")
    return (
        f"note: {len(matrices)} expert matrices were rounded to nearest because too few calibration tokens "
        f"reached them: {names}"
    )


def build_recipe(
    method: str | None, bits: int | None, group: int | None, *, asymmetric: bool, activations: str | None
) -> Recipe:
    """Recipe of the flags, with defaults. Raises UsageError for unknown values; `check_recipe` refuses
    combinations that do not work."""
    if activations not in (None, "int8"):
        raise UsageError(f"--activations is {activations!r}", "give --activations int8, or leave it out")
    with_activations = activations is not None or method == "smoothquant"
    name = method or ("smoothquant" if with_activations else "gptq")
    known_method: Method | None = next((known for known in METHODS if known == name), None)
    if known_method is None:
        raise UsageError(f"--method is {name!r}", f"give one of {', '.join(METHODS)}")
    bits = (8 if with_activations else 4) if bits is None else bits
    columns = (DEFAULT_GROUP if bits == 4 else 0) if group is None else group
    return Recipe(
        known_method,
        bits,
        columns or None,
        symmetric=not asymmetric,
        activations=with_activations,
        head_bits=16,  # transformers dequantizes by one scheme, and few versions of vLLM read a quantized head
    )


def check_gguf_flags(to: str, flags: dict[str, Any]) -> None:
    """Raises UsageError for another format, and for flags that do not apply to GGUF."""
    if to != "gguf":
        raise UsageError(f"--to is {to!r}", "give --to gguf, or leave it out to write a folder")
    field = next((field for field, value in flags.items() if value not in (None, False)), None)
    if field:
        raise UsageError(f"{io.flag_name(field)} does not apply to --to gguf", "give --type q4_0 or q8_0 instead")


def quantize_to_folder(
    header: Header,
    recipe: Recipe,
    target: Path,
    text: str | None,
    display: progress.QuantizeProgress,
    *,
    force: bool,
) -> "QuantizationResult":
    """text: for calibration, None: the bundled text. Raises the errors of `check_recipe` and `make_artefact`."""
    from localllm.quantize.check import check_group_size, check_recipe  # imports torch
    from localllm.quantize.quantizer import make_artefact
    from localllm.quantize.source import check_source

    check_source(header)
    check_recipe(recipe)
    check_group_size(header, recipe)
    return make_artefact(header, recipe, target, display.part, text=text, force=force)


def quantize_to_gguf(
    header: Header, type: str, target: Path, display: progress.QuantizeProgress, *, force: bool
) -> None:
    from localllm.quantize.gguf_file import write_gguf

    write_gguf(header, type, target, display.part, force=force)


def measure_quality(
    model: str, target: Path, recipe: Recipe | None, errors: dict[str, float], text: str | None, text_name: str
) -> Quality | None:
    """Compare the result with its source, and store the report beside the weights of a folder. None if the models
    do not fit into memory."""
    from localllm.comparison.compare import compare_models
    from localllm.comparison.subject import find_subject
    from localllm.quality.report import Error, write_report

    settings = Settings.from_environment()
    with status("measuring the loss of quality"):
        try:
            quality = compare_models(
                find_subject(model, settings),
                find_subject(str(target.absolute()), settings),
                settings,
                text,
                text_name=text_name,
                note=note,
            )
        except DoesNotFit as error:
            note(f"note: quality was not measured: {error}")
            return None
        except KeyboardInterrupt:
            note(f"{target} is complete, but was not measured; use `localllm diff {model} {target}`")
            raise
    if recipe is None:
        return quality
    largest_first = sorted(errors.items(), key=lambda item: -item[1])
    quality = dataclasses.replace(
        quality,
        recipe=dataclasses.asdict(recipe),
        matrices=tuple(Error(name, error) for name, error in largest_first),
    )
    write_report(quality, target)
    return quality

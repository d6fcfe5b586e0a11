"""One run of the quantizer: a model's folder and a recipe become an artefact, or go on becoming one."""

from collections.abc import Callable
from pathlib import Path

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.quantize.artefact import Artefact
from localllm.quantize.calibrate import calibration_windows, default_calibration_text
from localllm.quantize.driver import quantize_layers
from localllm.quantize.recipe import Recipe
from localllm.quantize.states import QuantizationResult, digest_token_ids
from localllm.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]  # part, how many are whole, of how many


def make_artefact(
    header: Header,
    recipe: Recipe,
    folder: Path,
    on_progress: Progress,
    *,
    text: str | None = None,
    force: bool = False,
) -> QuantizationResult:
    """text: for statistics, where the recipe uses any; None is the project's own.

    Raises what `Artefact` and `quantize` raise, UsageError for a text that is too short.
    """
    ids = None
    if recipe.method != "rtn":
        tokens = Tokenizer.from_folder(header.path).encode(default_calibration_text() if text is None else text)
        ids = calibration_windows(tokens, parse_config(header.config).max_context)
    calibration = digest_token_ids(ids) or None
    with Artefact(folder, header, recipe, calibration=calibration, force=force) as artefact:
        outcome = quantize_layers(header, recipe, ids, artefact, on_progress, artefact.states)
        artefact.finish()
    return outcome

"""Runs the quantizer: turns a model's folder and a recipe into an artefact, or resumes doing so."""

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UsageError
from localllm.quantize.artefact import Artefact
from localllm.quantize.driver import quantize_layers
from localllm.quantize.source import INSTEAD, Recipe, check_source
from localllm.quantize.states import QuantizationResult, digest_token_ids
from localllm.quantize.store import artefact_lock, artefact_path, find_artefact, recipe_of
from localllm.text.tokenizer import Tokenizer

# Calibration text to windows of token ids.
WINDOW_TOKENS = 512  # tokens
MIN_CALIBRATION_TOKENS = 2048
MAX_WINDOWS = 64


def default_calibration_text() -> str:
    """Return prose, dialogue, code, lists and numbers in several languages, written for this project."""
    return (resources.files("localllm.quantize") / "calibration.txt").read_text(encoding="utf-8")


def calibration_windows(ids: Sequence[int], context: int) -> Tensor:
    """Return windows [windows, T] int64 of a text's tokens, dropping an incomplete one at the end.

    T is 512, or the model's context if that is shorter. For a text of more than 64 windows, 64 evenly spaced ones
    are returned. Raises UsageError for a text of fewer than 2,048 tokens.
    """
    if len(ids) < MIN_CALIBRATION_TOKENS:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens, but {MIN_CALIBRATION_TOKENS} are needed",
            "name a longer text with --calib, or leave out --calib",
        )
    length = min(WINDOW_TOKENS, context)
    count = len(ids) // length
    indices = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).round().long()
    return torch.tensor(ids[: count * length]).view(count, length)[indices]


Progress = Callable[[str, int, int], None]  # part, number of complete parts, number of parts


def make_artefact(
    header: Header,
    recipe: Recipe,
    folder: Path,
    on_progress: Progress,
    *,
    text: str | None = None,
    force: bool = False,
) -> QuantizationResult:
    """Quantize a model. text: calibration text, if the recipe uses one; None for the project's own.

    Raises like `Artefact` and `quantize_layers`, and UsageError for a text that is too short.
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


# `--quant`: quantizes a model to INT8 or INT4 the first time, and reuses the result later.


def find_or_quantize(
    header: Header,
    quant: str,
    home: Path,
    on_progress: Progress = lambda part, done, count: None,
    notify: Callable[[str], object] = lambda text: None,
) -> Path:
    """Return the folder of the quantized model. notify: receives a message for the user.

    Raises UsageError for a source that is already quantized, and like `make_artefact`; an interrupted run is
    resumed the next time.
    """
    recipe = recipe_of(quant)
    check_source(header, INSTEAD)
    folder = artefact_path(home, header.path, quant)
    with artefact_lock(folder, lambda: notify(f"another process is quantizing {header.path}; waiting for it")):
        if (existing := find_artefact(home, header.path, quant)) is not None:
            return existing
        make_artefact(header, recipe, folder, on_progress, force=True)
    return folder

"""Calibration text to windows of token ids. Knows nothing of models but how long a context they have."""

from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor

from localllm.errors import UsageError

WINDOW_TOKENS = 512  # tokens
MIN_CALIBRATION_TOKENS = 2048
MAX_WINDOWS = 64


def default_calibration_text() -> str:
    """Prose, dialogue, code, lists and numbers in several languages, written for this project."""
    return (resources.files("localllm.quantize") / "calibration.txt").read_text(encoding="utf-8")


def calibration_windows(ids: Sequence[int], context: int) -> Tensor:
    """Of a text's tokens, [windows, T] int64: T is 512, or the model's context where that is shorter; what is left
    at the end is not used. Of a text of more than 64 windows those are taken that are spread evenly over it.

    Raises UsageError for a text of less than 2,048 tokens.
    """
    if len(ids) < MIN_CALIBRATION_TOKENS:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens and {MIN_CALIBRATION_TOKENS} are needed",
            "name a longer text with --calib, or leave it out",
        )
    length = min(WINDOW_TOKENS, context)
    count = len(ids) // length
    chosen = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).round().long()
    return torch.tensor(ids[: count * length]).view(count, length)[chosen]

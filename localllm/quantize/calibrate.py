"""Calibration text to windows of token ids. Knows nothing of models but how long a context they have."""

from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor

from localllm.errors import UsageError

WINDOW = 512  # tokens
LEAST_TOKENS = 2048
MOST_WINDOWS = 64


def default_text() -> str:
    """Prose, dialogue, code, lists and numbers in several languages, written for this project."""
    return (resources.files("localllm.quantize") / "calibration.txt").read_text(encoding="utf-8")


def windows(ids: Sequence[int], context: int) -> Tensor:
    """Of a text's tokens, [windows, T] int64: T is 512, or the model's context where that is shorter; what is left
    at the end is not used. Of a text of more than 64 windows those are taken that are spread evenly over it.

    Raises UsageError for a text of less than 2,048 tokens.
    """
    if len(ids) < LEAST_TOKENS:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens and {LEAST_TOKENS} are needed",
            "name a longer text with --calib, or leave it out",
        )
    length = min(WINDOW, context)
    count = len(ids) // length
    chosen = torch.linspace(0, count - 1, min(count, MOST_WINDOWS)).round().long()
    return torch.tensor(ids[: count * length]).view(count, length)[chosen]

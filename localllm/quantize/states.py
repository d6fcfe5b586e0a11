"""What a run that was killed needs to go on at a layer: the hidden states before it, and what was measured so far.

One safetensors file in the folder of what is being written, renamed into place before the shard of the layer
before it is written; the file before it is removed after that. Without it, or with one of other token ids, a run
begins at the first layer.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from localllm.quantize import shards

STATE_FILE = "states-{}.safetensors"


@dataclass
class QuantizationResult:
    """errors: of each matrix, |X Q(W)^T - X W^T| / |X W^T| over calibration inputs X, or |Q(W) - W| / |W| where
    there are none; rounded: matrices of experts that too few tokens reached, rounded to nearest instead."""

    errors: dict[str, float] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)


def digest_token_ids(ids: Tensor | None) -> str:
    """Of token ids: those that states belong to."""
    return "" if ids is None else hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()


def save_state(
    folder: Path, layer: int, calibration_digest: str, outcome: QuantizationResult, tensors: Mapping[str, Tensor]
) -> None:
    """What is there before this layer runs. calibration_digest: the digest of the token ids. Raises as
    `shards.save`."""
    fields = {
        "errors": json.dumps(outcome.errors),
        "rounded": json.dumps(outcome.rounded),
        "text": calibration_digest,
    }
    shards.save_tensors(folder / STATE_FILE.format(layer), tensors, fields, folder)


def remove_state(folder: Path, layer: int) -> None:
    (folder / STATE_FILE.format(layer)).unlink(missing_ok=True)


def load_state(
    folder: Path, layer: int, calibration_digest: str
) -> tuple[QuantizationResult, dict[str, Tensor]] | None:
    """None where there are none for this layer and these token ids."""
    file = folder / STATE_FILE.format(layer)
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            fields = opened.metadata() or {}
            if fields.get("text") != calibration_digest:
                return None
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no iterator
        return QuantizationResult(json.loads(fields["errors"]), json.loads(fields["rounded"])), tensors
    except (SafetensorError, OSError, KeyError, ValueError):
        return None  # damaged: it is made again

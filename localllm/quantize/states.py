"""Saves what an interrupted run needs to resume at a layer: the hidden states before it, and the errors so far.

One safetensors file in the partial folder, renamed into place before the shard of the layer is written; the
previous file is removed afterwards. Without it, or with one for other token ids, a run starts at the first layer.
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
    """errors: of each matrix, |X Q(W)^T - X W^T| / |X W^T| over calibration inputs X, or |Q(W) - W| / |W| without
    any; rounded: matrices of experts that too few tokens reached, which were rounded to nearest instead.
    """

    errors: dict[str, float] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)


def digest_token_ids(ids: Tensor | None) -> str:
    """Return a digest of the token ids that states belong to."""
    return "" if ids is None else hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()


def save_state(
    folder: Path, layer: int, calibration_digest: str, outcome: QuantizationResult, tensors: Mapping[str, Tensor]
) -> None:
    """Save the state before this layer. Raises like `shards.save_tensors`.

    calibration_digest: digest of the token ids
    """
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
    """Return the saved state; None if there is none for this layer and these token ids."""
    file = folder / STATE_FILE.format(layer)
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as state:
            fields = state.metadata() or {}
            if fields.get("text") != calibration_digest:
                return None
            tensors = {name: state.get_tensor(name) for name in state.keys()}  # noqa: SIM118 - no iterator
        return QuantizationResult(json.loads(fields["errors"]), json.loads(fields["rounded"])), tensors
    except (SafetensorError, OSError, KeyError, ValueError):
        return None  # damaged: it is computed again

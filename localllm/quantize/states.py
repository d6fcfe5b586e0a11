"""Saves what an interrupted run needs to resume at a layer: the hidden states before it, and the errors so far.

One safetensors file in the partial folder, renamed into place before the shard of the layer is written; the
previous file is removed afterwards. Without it, or with one for other token ids, a run starts at the first layer.
"""

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from localllm.files import explain_disk_errors
from localllm.quantize.store import DRAFT_SUFFIX, publish_draft

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
    """Save the state before this layer. Raises the errors of `save_tensors`.

    calibration_digest: digest of the token ids
    """
    fields = {
        "errors": json.dumps(outcome.errors),
        "rounded": json.dumps(outcome.rounded),
        "text": calibration_digest,
    }
    save_tensors(folder / STATE_FILE.format(layer), tensors, fields, folder)


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


def save_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], reported_folder: Path
) -> None:
    """Write a safetensors file atomically. reported_folder: the path in error messages.

    Raises DiskFull, or LocalLLMError if it cannot be written.
    """
    draft = file.with_suffix(DRAFT_SUFFIX)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    with explain_disk_errors(reported_folder, resumable=True):
        try:
            save_file(contiguous, draft, metadata=metadata)
        except SafetensorError as error:
            if "os error 28" in str(error):  # ENOSPC
                raise OSError(errno.ENOSPC, "the disk is full") from error
            raise
        publish_draft(draft, file)

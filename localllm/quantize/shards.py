"""Writes safetensors files atomically, and turns a full disk into an error message."""

import errno
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from localllm.files import explain_disk_errors
from localllm.quantize.disk import DRAFT_SUFFIX, publish_draft


def save_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], reported_folder: Path
) -> None:
    """Write a file atomically, like `disk.write_durably`. reported_folder: the path in error messages.

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

"""Safetensors files that are on the disk before anybody sees them, and a full disk as a sentence."""

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
    """The whole file or none, as `disk.put`. reported_folder: what an error calls the place. Raises DiskFull,
    LocalLLMError
    where it cannot be written."""
    draft = file.with_suffix(DRAFT_SUFFIX)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    with explain_disk_errors(reported_folder, resumable=True):
        try:
            save_file(whole, draft, metadata=metadata)
        except SafetensorError as error:
            if "os error 28" in str(error):  # ENOSPC
                raise OSError(errno.ENOSPC, "the disk is full") from error
            raise
        publish_draft(draft, file)

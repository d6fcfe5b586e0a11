"""Safetensors files that are on the disk before anybody sees them, and a full disk as a sentence."""

import errno
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from localllm.files import writing
from localllm.quantize.disk import DRAFT, settle


def save(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], folder: Path) -> None:
    """The whole file or none, as `disk.put`. folder: what an error calls the place. Raises DiskFull, LocalLLMError
    where it cannot be written."""
    draft = file.with_suffix(DRAFT)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    with writing(folder, goes_on=True):
        try:
            save_file(whole, draft, metadata=metadata)
        except SafetensorError as error:
            if "os error 28" in str(error):  # ENOSPC
                raise OSError(errno.ENOSPC, "the disk is full") from error
            raise
        settle(draft, file)

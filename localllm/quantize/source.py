"""Identifies the model that an artefact was made from, so that it is only reused for that model. No torch.

A revision on the Hub is identified by its commit; a local folder by its path with the sizes and times of its
files.
"""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel, UsageError
from localllm.hub.hf_cache import parse_snapshot_path
from localllm.hub.model_files import weight_files

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")
PARTIAL_SUFFIX = ".partial"  # of a folder that is being written
RECIPE_FILE = "recipe.json"  # in an artefact: its source and recipe
INSTEAD = "leave out --quant, or "  # start of a remedy
UNQUANTIZED_MODEL_REMEDY = "name the edition in safetensors that is not quantized (of a short name, NAME-bf16)"


@dataclass(frozen=True)
class Recipe:
    """Method and format of a quantization.

    rtn: round to nearest, with scales of the smallest squared error; the only method without calibration text.
    """

    method: Method = "rtn"
    bits: int = 4  # of the layers' matrices: 4 or 8
    group: int | None = 128  # columns that share a scale; None: an entire row
    symmetric: bool = True
    activations: bool = False  # quantize activations to INT8 with a scale per token (W8A8)
    head_bits: int = 8  # of the head, with the scheme of INT8 layers or a scale per row; 16: unquantized


def check_source(header: Header, alternative: str = "") -> None:
    """Raise UsageError for GGUF files and weights that are already quantized, and UnsupportedModel for embedders.

    alternative: another remedy, ending with a comma and "or"
    """
    if header.gguf is not None:
        raise UsageError(
            f"{header.path} is a GGUF file, but only safetensors can be quantized",
            f"{alternative}{UNQUANTIZED_MODEL_REMEDY}",
        )
    if parse_config(header.config).encoder:
        raise UnsupportedModel(
            f"{header.path} is an embedding model; only models that generate tokens can be quantized"
        )
    if header.quantization:
        raise UsageError(
            f"{header.path} is already quantized ({header.quantization}), and quantizing twice adds the errors",
            f"{alternative}{UNQUANTIZED_MODEL_REMEDY}",
        )


def source_identity(model: Path) -> dict[str, Any]:
    """Return the identity of a Hugging Face folder, as JSON values. Raises the errors of `weight_files`."""
    if revision := hub_revision(model):
        repo, commit = revision
        return {"repo": repo, "commit": commit}
    stats = {name: (model / name).stat() for name in ("config.json", *weight_files(model))}
    return {
        "folder": str(model.resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def hub_revision(model: Path) -> tuple[str, str] | None:
    """Return repository and commit of a snapshot in the cache; None for any other folder."""
    snapshot = parse_snapshot_path(model)
    return snapshot[:2] if snapshot and snapshot[2] == PurePath() else None

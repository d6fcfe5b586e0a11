"""Which model an artefact was made of, so that it is found again and never taken for that of another. No torch.

A revision of the Hub is its commit; a folder of the person's own is its place with the sizes and times of its
files.
"""

from pathlib import Path, PurePath
from typing import Any

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UnsupportedModel, UsageError
from localllm.hub.folder import weight_files
from localllm.hub.store import parse_snapshot_path

PARTIAL_SUFFIX = ".partial"  # ends the name of a folder that is being written
RECIPE_FILE = "recipe.json"  # in an artefact: what it was made of, and how
INSTEAD = "leave out --quant, or "  # of a remedy
UNQUANTIZED_MODEL_REMEDY = "name the edition in safetensors that is not quantized (of a short name, NAME-bf16)"


def check_source(header: Header, alternative: str = "") -> None:
    """Raises UsageError for GGUF files and weights that are quantized already, UnsupportedModel for what gives no
    tokens to measure the loss by. alternative: what else could be done, with a comma."""
    if header.gguf is not None:
        raise UsageError(
            f"{header.path} is a GGUF file, and safetensors can be quantized",
            f"{alternative}{UNQUANTIZED_MODEL_REMEDY}",
        )
    if parse_config(header.config).encoder:
        raise UnsupportedModel(f"{header.path} gives vectors, and models that give tokens can be quantized")
    if header.quantization:
        raise UsageError(
            f"{header.path} is stored as {header.quantization}, and rounding twice loses twice",
            f"{alternative}{UNQUANTIZED_MODEL_REMEDY}",
        )


def source_identity(model: Path) -> dict[str, Any]:
    """Of a Hugging Face folder, as JSON holds it. Raises as `weight_files`."""
    if revision := hub_revision(model):
        repo, commit = revision
        return {"repo": repo, "commit": commit}
    states = {name: (model / name).stat() for name in ("config.json", *weight_files(model))}
    return {
        "folder": str(model.resolve()),
        "files": {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()},
    }


def hub_revision(model: Path) -> tuple[str, str] | None:
    """Repository and commit of a snapshot in the cache; None for any other folder."""
    found = parse_snapshot_path(model)
    return found[:2] if found and found[2] == PurePath() else None

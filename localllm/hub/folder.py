"""What a model folder says about itself: its JSON files and the headers of its weights. Reads no tensor.

Raises DamagedModel where a file contradicts its format.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from localllm.errors import DamagedModel


@dataclass(frozen=True)
class FolderFacts:
    """None where the folder does not say."""

    architecture: str | None
    layers: int | None
    context: int | None
    parameters: int | None
    dtypes: tuple[str, ...]  # of the tensors as stored
    weight_bytes: int
    quantization: str | None
    chat_template: bool
    generation_config: Mapping[str, Any]


def missing_files(folder: Path) -> list[str]:
    """The files that a model needs and that are not in this folder; empty if it can be loaded."""
    needed = ["config.json", "tokenizer.json", *_weight_files(folder)]
    return [name for name in needed if not (folder / name).exists()]


def _weight_files(folder: Path) -> list[str]:
    """One file, or those that the index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return ["model.safetensors"]
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise DamagedModel(f"{index} names no weight files", "download the model again")
    return sorted(set(files.values()))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DamagedModel(f"{path} is not JSON ({error})", "download the model again") from error
    if not isinstance(content, dict):
        raise DamagedModel(f"{path} holds no JSON object", "download the model again")
    return content


def describe(folder: Path) -> FolderFacts:
    """Reads config.json, generation_config.json, tokenizer_config.json and the weights' headers."""
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config") or {}
    files = sorted(folder.glob("*.safetensors"))
    tensors = [tensor for file in files for tensor in _tensors(file)]
    return FolderFacts(
        architecture=next(iter(config.get("architectures") or []), None),
        layers=config.get("num_hidden_layers"),
        context=config.get("max_position_embeddings"),
        # Packed weights hold several parameters in one element, so their shapes do not count them.
        parameters=None if quantization else sum(math.prod(shape) for shape, _ in tensors),
        dtypes=tuple(sorted({dtype for _, dtype in tensors})),
        weight_bytes=sum(file.stat().st_size for file in files),
        quantization=quantization.get("format") or quantization.get("quant_method"),
        chat_template=_has_chat_template(folder),
        generation_config=read_json(folder / "generation_config.json"),
    )


def _tensors(file: Path) -> list[tuple[list[int], str]]:
    """Shape and type of every tensor of a safetensors file."""
    try:
        with safe_open(file, framework="np") as weights:
            slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a dict)
            return [(part.get_shape(), part.get_dtype()) for part in slices]
    except SafetensorError as error:
        raise DamagedModel(f"{file} is no whole safetensors file ({error})", "download it again") from error


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))

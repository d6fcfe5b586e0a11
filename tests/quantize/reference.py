"""Quantized matrices in memory, written as a checkpoint of their dequantized values."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.checkpoint.header import Header
from localllm.quant.dequantize import dequantize
from localllm.quant.tensor import QuantizedTensor


class MemoryArtefact:
    """An artefact in memory."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Tensor | QuantizedTensor]] = {}

    @property
    def done(self) -> set[str]:
        return set(self.parts)

    def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
        self.parts[part] = dict(tensors)

    @property
    def tensors(self) -> dict[str, Tensor | QuantizedTensor]:
        return {name: tensor for part in self.parts.values() for name, tensor in part.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plain(tensor: Tensor | QuantizedTensor) -> Tensor:
    """Dequantized float32 matrix."""
    if isinstance(tensor, QuantizedTensor):
        return dequantize(tensor, torch.float32)
    return tensor.float()


def write_plain(kept: MemoryArtefact, header: Header, folder: Path) -> Path:
    """Write a checkpoint in float32 with Llama's tensor names, for families without stacked tensors."""
    folder.mkdir(parents=True)
    names = {name: entry.name for name, entry in header.tensors.items()}
    tensors = {names.get(name, name): plain(tensor).contiguous() for name, tensor in kept.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {key: value for key, value in header.config.items() if key != "quantization_config"}
    tied = config.get("tie_word_embeddings", False) and "lm_head.weight" not in tensors
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    for file in header.path.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder

"""From a checkpoint's tensors to a model's weights: one at a time, checked, fused, in the dtype and place they
will be used in. At no time are there two copies of more than one matrix."""

import torch
from torch import Tensor

from localllm.checkpoint.quantized import take_int8
from localllm.checkpoint.safetensors import Weights
from localllm.errors import UnsupportedModel
from localllm.quant.formats import int8
from localllm.quant.tensor import QuantizedTensor


class Source:
    """Where layers take their weights from, under one prefix."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype):
        self.weights = weights
        self.device = device
        self.dtype = dtype

    def under(self, name: str) -> "Source":
        return Source(self.weights.under(name), self.device, self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        return self.weights.take(name, (size,)).to(self.device, self.dtype)

    def vectors(self, names: dict[str, int], suffix: str) -> Tensor:
        """Several vectors one after another, by name and size."""
        return torch.cat([self.vector(f"{name}.{suffix}", size) for name, size in names.items()])

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix that is never quantized: the embedding."""
        return self.weights.take(name, (rows, columns)).to(self.device, self.dtype)

    def matrix(self, names: dict[str, int], columns: int) -> Tensor | QuantizedTensor:
        """The named matrices stacked by rows, by name and rows: qkv in one product, gate and up in another."""
        quantized = [take_int8(self.weights, name, (rows, columns)) for name, rows in names.items()]
        parts = [q.parts for q in quantized if q]
        if 0 < len(parts) < len(names):
            raise UnsupportedModel(
                f"only some of {', '.join(names)} are quantized",
                "use a checkpoint that quantizes all or none of them",
            )
        if parts:
            return QuantizedTensor(
                int8.FORMAT,
                (sum(names.values()), columns),
                {
                    "q": torch.cat([p["q"] for p in parts]).to(self.device),
                    "scale": torch.cat([p["scale"] for p in parts]).to(self.device, self.dtype),
                },
            )
        if len(names) == 1:
            [(name, rows)] = names.items()
            return self.table(f"{name}.weight", rows, columns)
        stacked = torch.empty(sum(names.values()), columns, dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in names.items():
            stacked[at : at + rows] = self.weights.take(f"{name}.weight", (rows, columns))
            at += rows
        return stacked

"""From a checkpoint's tensors to a model's weights: one at a time, checked, fused, in the dtype and place they
will be used in. Matrices that are fused are copied; what the file maps for them can be dropped by the system."""

import torch
from torch import Tensor

from localllm.checkpoint.quantized import take_int8
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.errors import UnsupportedModel
from localllm.quant.formats import int8
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.linear import reads_packed


class Source:
    """Where layers take their weights from, under one prefix. `quantized`: may matrices be stored as INT8?

    Raises what `Weights` raises, and DamagedModel for a weight that is NaN or infinite in the dtype it runs in.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype, quantized: bool = False):
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.quantized = quantized

    def under(self, name: str) -> "Source":
        return Source(self.weights.under(name), self.device, self.dtype, self.quantized)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One that is never quantized: a norm, a bias, the embedding."""
        return self.checked(name, self.weights.take(name, shape).to(self.device, self.dtype))

    def vectors(self, names: dict[str, int], suffix: str) -> Tensor:
        """Several vectors one after another, by name and size."""
        return torch.cat([self.tensor(f"{name}.{suffix}", size) for name, size in names.items()])

    def matrix(self, names: dict[str, int], columns: int) -> Tensor | QuantizedTensor:
        """The named matrices stacked by rows, by name and rows: qkv in one product, gate and up in another."""
        if self.quantized:
            found = [take_int8(self.weights, name, (rows, columns)) for name, rows in names.items()]
            parts = {name: q.parts for name, q in zip(names, found, strict=True) if q}
            if 0 < len(parts) < len(names):
                raise UnsupportedModel(
                    f"only {', '.join(parts)} of {', '.join(names)} are quantized",
                    "use a checkpoint that quantizes all or none of them",
                )
            if parts:
                return self.packed(parts, (sum(names.values()), columns))
        if len(names) == 1:
            [(name, rows)] = names.items()
            return self.tensor(f"{name}.weight", rows, columns)
        stacked = torch.empty(sum(names.values()), columns, dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in names.items():
            stacked[at : at + rows] = self.weights.take(f"{name}.weight", (rows, columns))
            self.checked(f"{name}.weight", stacked[at : at + rows])
            at += rows
        return stacked

    def packed(self, parts: dict[str, dict[str, Tensor]], shape: tuple[int, int]) -> Tensor | QuantizedTensor:
        """INT8 as it is where a kernel reads it so, else in the model's dtype: once, not in every step."""
        scales = [self.checked(f"{name}.weight_scale", p["scale"].to(self.dtype)) for name, p in parts.items()]
        weight = QuantizedTensor(
            int8.FORMAT,
            shape,
            {
                "q": torch.cat([p["q"] for p in parts.values()]).to(self.device),
                "scale": torch.cat(scales).to(self.device),
            },
        )
        if reads_packed(columns=shape[1], dtype=self.dtype, device=self.device):
            return weight
        return int8.dequantize(weight, self.dtype)

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        check_finite(self.weights.prefix + name, tensor)
        return tensor

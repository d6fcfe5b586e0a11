"""From a checkpoint's tensors to a model's weights: one at a time, checked, fused, in the dtype and place they
will be used in. Matrices that are fused are copied; what the file maps for them can be dropped by the system."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.checkpoint.quantized import take_blocks, take_quantized
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.device import dtype_name
from localllm.errors import UnsupportedModel
from localllm.quant.dequantize import dequantize
from localllm.quant.packing import reads_packed
from localllm.quant.tensor import QuantizedTensor

STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Source:
    """Where layers take their weights from, under one prefix.

    Raises what `Weights` raises, and DamagedModel for a weight that is NaN or infinite in the dtype it runs in.
    """

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype):
        self.weights = weights
        self.device = device
        self.dtype = dtype

    def under(self, name: str) -> "Source":
        return Source(self.weights.under(name), self.device, self.dtype)

    def has_matrix(self, name: str) -> bool:
        """Is there a matrix of this name, plain or quantized?"""
        return self.weights.has(f"{name}.weight") or self.weights.has(f"{name}.blocks")

    def norm(self, name: str, size: int) -> Tensor:
        """[size] float32: what the norm multiplies by, whatever it is stored less."""
        return self.exact(name, size) + self.weights.header.layout.norm_offset

    def exact(self, name: str, *shape: int) -> Tensor:
        """One that is so small that it stays in float32, whatever the model's dtype."""
        return self.checked(name, self.weights.take(name, shape).to(self.device, torch.float32))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One that is never quantized: a norm, a bias, the embedding."""
        return self.checked(name, self.weights.take(name, shape).to(self.device, self.dtype))

    def table(self, name: str, rows: int, columns: int) -> Tensor | QuantizedTensor:
        """A matrix that is looked up by row, as it is stored, on the CPU mapped from the file: only rows that are
        looked up are ever read. What is NaN in them shows in the logits, where it ends the answer."""
        stored = self.weights.stored(f"{name}.weight")
        if stored and stored.offset is not None:
            return self.matrix({name: rows}, columns)
        return self.weights.take(f"{name}.weight", (rows, columns)).to(self.device)

    def vectors(self, names: dict[str, int], suffix: str) -> Tensor:
        """Several vectors one after another, by name and size."""
        return torch.cat([self.tensor(f"{name}.{suffix}", size) for name, size in names.items()])

    def matrices(
        self, names: dict[str, int], columns: int, order: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor | QuantizedTensor, ...]:
        """The named matrices, by name and rows, in as few as can be: stacked, or each by itself where a GGUF file
        holds them in blocks, which are mapped and may differ in format.

        order: makes [rows] int64, which row of a single matrix comes first, second, ...; None: as they are.
        """
        if order is not None:
            matrix = self.matrix(names, columns)  # its size is checked before an order is made
            return (reordered(matrix, order().to(self.device)),)
        stored = [self.weights.stored(f"{name}.weight") for name in names]
        if any(entry and entry.offset is not None for entry in stored):
            return tuple(self.matrix({name: rows}, columns) for name, rows in names.items())
        return (self.matrix(names, columns),)

    def matrix(self, names: dict[str, int], columns: int) -> Tensor | QuantizedTensor:
        """The named matrices stacked by rows, by name and rows: qkv in one product, gate and up in another."""
        if len(names) == 1:
            [(name, rows)] = names.items()
            if blocks := take_blocks(self.weights, name, (rows, columns), plain=STORED[self.dtype]):
                parts = {part: packed.to(self.device) for part, packed in blocks.parts.items()}
                return replace(blocks, parts=parts)
        found = {name: take_quantized(self.weights, name, (rows, columns)) for name, rows in names.items()}
        packed = {name: q for name, q in found.items() if q}
        if 0 < len(packed) < len(names):
            raise UnsupportedModel(
                f"only {', '.join(packed)} of {', '.join(names)} are quantized",
                "use a checkpoint that quantizes all or none of them",
            )
        if packed:
            return self.packed(packed, (sum(names.values()), columns))
        if len(names) == 1:
            [(name, rows)] = names.items()
            return self.tensor(f"{name}.weight", rows, columns)
        # All are there and of their shapes before memory is asked for: config.json may name any.
        mapped = {name: self.weights.take(f"{name}.weight", (rows, columns)) for name, rows in names.items()}
        stacked = torch.empty(sum(names.values()), columns, dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in names.items():
            stacked[at : at + rows] = mapped[name]
            self.checked(f"{name}.weight", stacked[at : at + rows])
            at += rows
        return stacked

    def plain(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] of one that is used in pieces, and therefore dequantized."""
        weight = self.matrix({name: rows}, columns)
        return weight if isinstance(weight, Tensor) else dequantize(weight, self.dtype)

    def packed(self, found: dict[str, QuantizedTensor], shape: tuple[int, int]) -> Tensor | QuantizedTensor:
        """As it is where a kernel reads it so, else in the model's dtype: once, not in every step."""
        [form] = {q.format for q in found.values()}
        parts = {}
        for part in next(iter(found.values())).parts:
            each = [self.part(name, q.parts[part]) for name, q in found.items()]
            # Always copied: a mapped file gives no alignment, and torch's INT8 kernel crashes without it.
            parts[part] = torch.cat(each).to(self.device)
        weight = QuantizedTensor(form, shape, parts)
        if reads_packed(form, columns=shape[1], dtype=dtype_name(self.dtype), device=self.device.type):
            return weight
        return dequantize(weight, self.dtype)

    def part(self, name: str, part: Tensor) -> Tensor:
        """Scales that are numbers are checked, and kept in the model's dtype."""
        return self.checked(name, part.to(self.dtype)) if part.is_floating_point() else part

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        check_finite(self.weights.spelled(name), tensor)
        return tensor


def reordered(weight: Tensor | QuantizedTensor, order: Tensor) -> Tensor | QuantizedTensor:
    """The rows in another order; every part of a packed matrix has one row a row."""
    if isinstance(weight, Tensor):
        return weight[order]
    return replace(weight, parts={name: part[order] for name, part in weight.parts.items()})

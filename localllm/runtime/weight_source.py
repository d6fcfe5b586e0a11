"""From a checkpoint's tensors to a model's weights: one at a time, checked, fused, in the dtype and place they
will be used in. Matrices that are fused are copied; what the file maps for them can be dropped by the system."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.checkpoint.quantized import has_matrix, take_blocks, take_quantized
from localllm.checkpoint.safetensors import Weights, check_finite
from localllm.errors import DamagedModel
from localllm.metrics import PhaseTimer
from localllm.quant.dequantize import dequantize
from localllm.quant.packing import FP8, W8A8, stays_packed
from localllm.quant.tensor import QuantizedTensor, concat_quantized

STORED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WeightSource:
    """Where layers take their weights from, under one prefix.

    Raises what `Weights` raises, and DamagedModel for a weight that is NaN or infinite in the dtype it runs in.
    """

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, phases: PhaseTimer | None = None
    ):
        """phases: to note under `repack` how long weights were laid out for kernels."""
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.phases = phases or PhaseTimer()

    def under(self, name: str) -> "WeightSource":
        return WeightSource(self.weights.scoped(name), self.device, self.dtype, self.phases)

    def has_matrix(self, name: str) -> bool:
        return has_matrix(self.weights, name)

    def norm_weight(self, name: str, size: int) -> Tensor:
        """[size] float32: what the norm multiplies by, whatever it is stored less."""
        return self.float32_tensor(name, size) + self.weights.header.layout.norm_offset

    def float32_tensor(self, name: str, *shape: int) -> Tensor:
        """One that is so small that it stays in float32, whatever the model's dtype."""
        return self.checked_finite(name, self.weights.take(name, shape).to(self.device, torch.float32))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One that is never quantized: a norm, a bias, the embedding."""
        return self.checked_finite(name, self.weights.take(name, shape).to(self.device, self.dtype))

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor | QuantizedTensor:
        """A matrix that is looked up by row, as it is stored, on the CPU mapped from the file: only rows that are
        looked up are ever read. What is NaN in them shows in the logits, where it ends the answer."""
        stored = self.weights.stored_header(f"{name}.weight")
        if stored and stored.offset is not None:
            return self.matrix(name, rows, columns)
        return self.weights.take(f"{name}.weight", (rows, columns)).to(self.device)

    def concatenated_vectors(self, names: dict[str, int], suffix: str) -> Tensor:
        """Several vectors one after another, by name and size."""
        return torch.cat([self.tensor(f"{name}.{suffix}", size) for name, size in names.items()])

    def matrices(
        self, names: dict[str, int], columns: int, order: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor | QuantizedTensor, ...]:
        """The named matrices, by name and rows, in as few as can be, so that qkv is one product, and gate and up
        another: stacked, or each by itself where a GGUF file holds them in blocks, which are mapped, or where they
        differ in format, groups or order of columns.

        order: makes [rows] int64, which row of a single matrix comes first, second, ...; None: as they are.
        """
        if order is not None:
            [(name, rows)] = names.items()
            matrix = self.matrix(name, rows, columns)  # its size is checked before an order is made
            index = order().to(self.device)
            return (matrix[index] if isinstance(matrix, Tensor) else matrix.select_rows(index),)
        stored = [self.weights.stored_header(f"{name}.weight") for name in names]
        if len(names) == 1 or any(entry and entry.offset is not None for entry in stored):
            return tuple(self.matrix(name, rows, columns) for name, rows in names.items())
        found = {name: take_quantized(self.weights, name, (rows, columns)) for name, rows in names.items()}
        packed = [weight for weight in found.values() if weight]
        if not packed:
            return (self.stack_matrices(names, columns),)
        if len(packed) == len(names) and (whole := concat_quantized(packed)):
            return (self.packed_or_dequantized(whole, next(iter(names))),)
        return tuple(
            self.packed_or_dequantized(weight, name)
            if weight
            else self.tensor(f"{name}.weight", names[name], columns)
            for name, weight in found.items()
        )

    def matrix(self, name: str, rows: int, columns: int) -> Tensor | QuantizedTensor:
        """[rows, columns], in the format that it is stored in where it can stay so."""
        if blocks := take_blocks(self.weights, name, (rows, columns), plain=STORED_DTYPES[self.dtype]):
            return self.to_device(blocks)
        if packed := take_quantized(self.weights, name, (rows, columns)):
            return self.packed_or_dequantized(packed, name)
        return self.tensor(f"{name}.weight", rows, columns)

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] of one that is used in pieces, and therefore dequantized."""
        weight = self.matrix(name, rows, columns)
        return weight if isinstance(weight, Tensor) else dequantize(weight, self.dtype)

    def stack_matrices(self, names: dict[str, int], columns: int) -> Tensor:
        """The named matrices, none of them quantized, one below the other."""
        # All are there and of their shapes before memory is asked for: config.json may name any.
        mapped = {name: self.weights.take(f"{name}.weight", (rows, columns)) for name, rows in names.items()}
        whole = torch.empty(sum(names.values()), columns, dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in names.items():
            whole[at : at + rows] = mapped[name]
            self.checked_finite(f"{name}.weight", whole[at : at + rows])
            at += rows
        return whole

    def packed_or_dequantized(self, weight: QuantizedTensor, name: str) -> Tensor | QuantizedTensor:
        """As it is where a kernel reads it so, else in the model's dtype: once, not in every step."""
        if not stays_packed(weight.format, self.device.type):
            return self.checked_finite(f"{name}.weight", dequantize(weight, self.dtype).to(self.device))
        placed = self.to_device(weight)
        if weight.format == FP8 and (placed.parts["q"].view(torch.uint8).bitwise_and(127) == 127).any():
            raise DamagedModel(
                f"the tensor {self.weights.stored_name(f'{name}.weight')!r} holds values that are NaN",
                "fetch the model again",
            )
        if weight.format != W8A8:
            return placed
        # Copied: a mapped file gives no alignment, and these bytes go to a kernel of torch's.
        return replace(placed, parts={part: packed.clone() for part, packed in placed.parts.items()})

    def to_device(self, weight: QuantizedTensor) -> QuantizedTensor:
        """On the device; on the CPU as it is mapped."""
        return replace(weight, parts={part: packed.to(self.device) for part, packed in weight.parts.items()})

    def checked_finite(self, name: str, tensor: Tensor) -> Tensor:
        check_finite(self.weights.stored_name(name), tensor)
        return tensor

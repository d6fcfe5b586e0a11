"""A source of weights that keeps what it has read: a layer can be built again of tensors that were changed.

A layer asks it for its weights as it asks any source; what it asked for, by its runtime name and as the file would
store it plain, is in `tensors` from then on, however the file stores it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.checkpoint.safetensors import Weights
from localllm.quant.dequantize import dequantize
from localllm.runtime.weight_source import WeightSource


@dataclass
class RecordedWeights:
    """tensors: by runtime name; joined: the matrices that each product reads at once, by the id of their stack."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stacked_names: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def matrix_groups(self) -> list[tuple[str, ...]]:
        """The names of matrices, without `.weight`, those of one product together."""
        return list(self.stacked_names.values())


class RecordingSource(WeightSource):
    """`stack`: a layer is to run; otherwise nothing is stacked, and it only tells what it has."""

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        holding: RecordedWeights,
        stack: bool = True,
    ):
        super().__init__(weights, device, dtype)
        self.recorded = holding
        self.stack = stack

    def under(self, name: str) -> "RecordingSource":
        return RecordingSource(self.weights.scoped(name), self.device, self.dtype, self.recorded, self.stack)

    def full_name(self, name: str) -> str:
        return self.weights.prefix + name

    def record(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        tensors, full = self.recorded.tensors, self.full_name(name)
        if full not in tensors:
            tensors[full] = read()
        return tensors[full]

    def float32_tensor(self, name: str, *shape: int) -> Tensor:
        return self.record(name, lambda: super(RecordingSource, self).float32_tensor(name, *shape)).float()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """In no narrower dtype than it is stored in: what stays as it is keeps every bit."""

        def read() -> Tensor:
            found = self.weights.take(name, shape)
            wide = torch.float32 if found.dtype == torch.float64 else torch.promote_types(found.dtype, self.dtype)
            return self.checked_finite(name, found.to(self.device, wide))

        return self.record(name, read)

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor:
        def read() -> Tensor:
            found = super(RecordingSource, self).lookup_table(name, rows, columns)
            return found if isinstance(found, Tensor) else dequantize(found, self.dtype)

        return self.record(f"{name}.weight", read)

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.record(
            f"{name}.weight", lambda: super(RecordingSource, self).dequantized_matrix(name, rows, columns)
        )

    def matrices(
        self, names: dict[str, int], columns: int, order: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        each = [self.dequantized_matrix(name, rows, columns) for name, rows in names.items()]
        if not self.stack:
            stacked = torch.empty(0)
        else:
            stacked = torch.cat(each) if len(each) > 1 else each[0]
            # Row by row, as kernels have it: of one that lies otherwise they would make another, of no known id.
            stacked = (stacked if order is None else stacked[order()]).contiguous()
        self.recorded.stacked_names[id(stacked)] = tuple(map(self.full_name, names))
        return (stacked,)

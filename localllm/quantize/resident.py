"""A weight source that records what it has read, so that a layer can be rebuilt from modified tensors.

A layer takes its weights from it as from any source; each is recorded in `tensors` by its runtime name, dense,
however the file stores it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.checkpoint.tensors import Weights
from localllm.quant.dequantize import dequantize
from localllm.runtime.weight_source import WeightSource


@dataclass
class RecordedWeights:
    """tensors: by runtime name; stacked_names: the matrices that form one product, by the id of their stack."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stacked_names: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def matrix_groups(self) -> list[tuple[str, ...]]:
        """Return the names of matrices, without `.weight`, grouped by product."""
        return list(self.stacked_names.values())


class RecordingSource(WeightSource):
    """stack: the layer is going to run; otherwise no matrices are stacked, and names are only recorded."""

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        recorded: RecordedWeights,
        stack: bool = True,
    ):
        super().__init__(weights, device, dtype)
        self.recorded = recorded
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
        """Return a tensor, at least in its stored precision: tensors that stay unquantized keep every bit."""

        def read() -> Tensor:
            stored = self.weights.take(name, shape)
            dtype = (
                torch.float32 if stored.dtype == torch.float64 else torch.promote_types(stored.dtype, self.dtype)
            )
            return self.checked_finite(name, stored.to(self.device, dtype))

        return self.record(name, read)

    def dense_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix as any other tensor: methods compute with it."""
        return self.tensor(name, rows, columns)

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor:
        def read() -> Tensor:
            table = super(RecordingSource, self).lookup_table(name, rows, columns)
            return table if isinstance(table, Tensor) else dequantize(table, self.dtype)

        return self.record(f"{name}.weight", read)

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.record(
            f"{name}.weight", lambda: super(RecordingSource, self).dequantized_matrix(name, rows, columns)
        )

    def matrices(
        self,
        names: dict[str, int],
        columns: int,
        order: Callable[[], Tensor] | None = None,
        *,
        checked: bool = True,
    ) -> tuple[Tensor, ...]:
        matrices = [self.dequantized_matrix(name, rows, columns) for name, rows in names.items()]
        if not self.stack:
            stacked = torch.empty(0)
        else:
            stacked = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
            # Contiguous, as kernels need it: otherwise they would copy it, and the copy would have another id.
            stacked = (stacked if order is None else stacked[order()]).contiguous()
        self.recorded.stacked_names[id(stacked)] = tuple(map(self.full_name, names))
        return (stacked,)

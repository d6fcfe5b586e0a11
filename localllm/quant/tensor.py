"""A weight stored in fewer bits: its format, its shape and its packed parts by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

COLUMN_ORDER = "columns"  # the only part without a row per weight row


@dataclass(frozen=True)
class QuantizedTensor:
    """A packed weight.

    `group`: columns that share a scale; None if the format determines it, as in GGUF. The last group of a row may
    be shorter.
    """

    format: str  # `int8`, `q4_k`: see localllm/quant/formats
    shape: tuple[int, int]  # (out, in) of the weight
    parts: dict[str, Tensor]
    group: int | None = None
    activation_bits: int | None = None  # that a CPU rounds x to; None: as many as its dtype has
    # Values that kernels have prepared for this tensor, by keys of their own.
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def select_rows(self, index: Tensor) -> "QuantizedTensor":
        """Return the rows with these indices, in this order. index: [n] int64"""
        parts = {name: part if name == COLUMN_ORDER else part[index] for name, part in self.parts.items()}
        return replace(self, shape=(len(index), self.shape[1]), parts=parts)


def concat_matrices(weights: Sequence[Tensor | QuantizedTensor]) -> Tensor | QuantizedTensor | None:
    """Return dense matrices, or matrices in packed GPU layout, stacked by rows and copied; None if they differ.

    Packed ones keep their padding rows.
    """
    first = weights[0]
    if isinstance(first, Tensor):
        dense = [weight for weight in weights if isinstance(weight, Tensor) and weight.shape == first.shape]
        return torch.cat(dense) if len(dense) == len(weights) else None
    packed = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    layouts = [
        (w.format, w.group, w.shape, {name: (part.dtype, part.shape) for name, part in w.parts.items()})
        for w in packed
    ]
    if (
        len(packed) < len(weights)
        or COLUMN_ORDER in first.parts
        or any(layout != layouts[0] for layout in layouts)
    ):
        return None
    parts = {
        name: torch.cat([weight.parts[name] for weight in packed], 0 if name == "q" else 1) for name in first.parts
    }
    rows = parts["q"].shape[0] * parts["q"].shape[2]
    return replace(first, shape=(rows, first.shape[1]), parts=parts)


def concat_quantized(weights: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Return weights stacked by rows and copied; None if they differ in format, groups, column order or dtypes."""
    first = weights[0]
    for other in weights[1:]:
        if not same_layout(first, other):
            return None
        if COLUMN_ORDER in first.parts and not torch.equal(first.parts[COLUMN_ORDER], other.parts[COLUMN_ORDER]):
            return None
    parts = {
        name: part.clone() if name == COLUMN_ORDER else torch.cat([weight.parts[name] for weight in weights])
        for name, part in first.parts.items()
    }
    return replace(first, shape=(sum(weight.shape[0] for weight in weights), first.shape[1]), parts=parts)


def can_stack(first: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return whether the rows of both can be repacked as those of one weight."""
    return same_layout(first, other) and COLUMN_ORDER not in first.parts


def same_layout(first: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return whether both have the same format, groups, columns and dtypes of parts."""
    layouts = [
        (w.format, w.group, w.shape[1], {name: part.dtype for name, part in w.parts.items()})
        for w in (first, other)
    ]
    return layouts[0] == layouts[1]


@cache
def device_table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a constant table on the device, uploaded once.

    A new table in every step would be a copy from pageable memory, which waits for the device and cannot be
    captured.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def no_op() -> None:
    """Do nothing: the default of callbacks."""

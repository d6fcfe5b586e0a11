"""What a program knows of a weight in lanes (localllm/quant/formats/lanes.py), and how it reads a tile of it."""

from dataclasses import dataclass

import torch

from localllm.quant.formats.int4 import INT4_ZERO_POINT
from localllm.quant.packing import INTERLEAVED_BITS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu.ir import BFLOAT, FLOAT, HALF, INT, LANES, Element, Program, Value, vector_type

ELEMENT_TYPES: dict[torch.dtype, Element] = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT}
PART_NAMES: tuple[str, ...] = ("q", "scale", "zero", "minimum", "block_scale", "block_minimum")
VECTOR_BYTES = 64
PREFETCH_BYTES = 4096  # bytes: a core reads 12.5 GB/s of INT4 with it and 8.5 without


@dataclass(frozen=True)
class InterleavedLayout:
    """What of a weight a program is made for."""

    bits: int
    group: int
    scale_dtype: torch.dtype
    zero: bool
    minimum: bool
    groups_per_block: int  # 0: scales are numbers, not factors

    @classmethod
    def from_weight(cls, weight: QuantizedTensor) -> "InterleavedLayout":
        parts = weight.parts
        assert weight.group is not None
        blocks = parts["block_scale"].shape[1] if "block_scale" in parts else 0
        groups = parts["scale"].shape[1]
        return cls(
            INTERLEAVED_BITS[weight.format],
            weight.group,
            parts["scale"].dtype,
            "zero" in parts,
            "minimum" in parts,
            groups // blocks if blocks else 0,
        )

    @property
    def zero_point(self) -> int:
        return INT4_ZERO_POINT if self.bits == 4 and not self.minimum else 0

    @property
    def step_columns(self) -> int:
        """Columns that a program takes at a time."""
        return max(self.group, 32) if self.bits == 4 else self.group

    @property
    def groups_per_step(self) -> int:
        return self.step_columns // self.group

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far to shift a vector for its bytes: once for the low and once for the high halves, or not at
        all."""
        return (0, 4) if self.bits == 4 else (0,)

    def column(self, at: int, half: int) -> int:
        """The first column of the `at`-th vector's bytes, counted from the first of the step."""
        if self.bits == 8:
            return 4 * at
        return at // 4 * 32 + at % 4 * 4 + 16 * half


@dataclass(frozen=True)
class WeightTile:
    """A tile of a weight inside a program."""

    program: Program
    layout: InterleavedLayout
    parts: dict[str, Value]

    @classmethod
    def from_parts(
        cls, p: Program, layout: InterleavedLayout, tile: Value, groups: Value, parts: list[Value]
    ) -> "WeightTile":
        one = groups * LANES  # numbers of a tile
        size = layout.scale_dtype.itemsize
        sizes: dict[str, Value] = {
            "q": one * (layout.group * layout.bits // 8),
            "scale": one * size,
            "zero": one,
            "minimum": one * size,
        }
        if layout.groups_per_block:
            of_blocks = groups / layout.groups_per_block * (2 * LANES)
            sizes |= {"block_scale": of_blocks, "block_minimum": of_blocks}
        named: dict[str, Value] = dict(zip(PART_NAMES, parts, strict=True))
        return cls(p, layout, {name: p.address(named[name], tile * size) for name, size in sizes.items()})

    def load_group(self, name: str, group: Value) -> Value:
        """Of each row: its scale or minimum, or the factor."""
        if self.layout.groups_per_block:
            return self.program.load_bytes(self.parts[name], group * LANES, signed=True).to_float32()
        kind = ELEMENT_TYPES[self.layout.scale_dtype]
        return self.program.load_floats(kind, self.parts[name], group * (LANES * self.layout.scale_dtype.itemsize))

    def load_block(self, name: str, block: Value) -> Value:
        return self.program.load_floats(HALF, self.parts[name], block * (2 * LANES))

    def load_zero(self, group: Value) -> Value:
        return self.program.load_bytes(self.parts["zero"], group * LANES, signed=self.layout.bits == 8)

    def load_step(self, step: Value) -> list[Value]:
        """All bytes of a step, each vector with the prefetch of what is read some steps later."""
        p, size = self.program, self.layout.step_columns * self.layout.bits // 8 * LANES
        begin, found = p.address(self.parts["q"], step * size), []
        for offset in range(0, size, VECTOR_BYTES):
            found.append(p.load(vector_type(INT), begin, offset))
            p.prefetch(begin, offset + PREFETCH_BYTES)
        return found

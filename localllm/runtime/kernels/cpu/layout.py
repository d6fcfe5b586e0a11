"""The interleaved layout of quantized weights (`quant/formats/interleaved.py`), and reading a tile of it in IR."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from localllm.quant.formats.groups import INT4_ZERO_POINT, INT6_ZERO_POINT
from localllm.quant.packing import INTERLEAVED_BITS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu.ir import (
    BFLOAT,
    FEW_REGISTERS,
    FLOAT,
    HALF,
    INT,
    LANES,
    Element,
    Program,
    Value,
    vector_type,
)

ELEMENT_TYPES: dict[torch.dtype, Element] = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT}
PART_NAMES: tuple[str, ...] = ("q", "scale", "zero", "minimum", "block_scale", "block_minimum")
VECTOR_BYTES = 64
UPPER_2 = 0xC0C0C0C0 - 2**32  # the upper two bits of four bytes, as int32
PREFETCH_BYTES = 4096  # distance: a core reads INT4 at 12.5 GB/s with it, at 8.5 GB/s without


@dataclass(frozen=True)
class InterleavedLayout:
    """Properties of a weight that a kernel is compiled for."""

    bits: int  # of a code
    group: int  # columns that share a scale
    scale_dtype: torch.dtype
    zero: bool  # has zero points
    minimum: bool  # has minima
    groups_per_block: int  # 0: scales are numbers, not factors of a block's scale

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
        return 0 if self.minimum else {4: INT4_ZERO_POINT, 6: INT6_ZERO_POINT}.get(self.bits, 0)

    @property
    def step_columns(self) -> int:
        """Columns per iteration of a kernel."""
        return max(self.group, 32) if self.bits == 4 else self.group

    @property
    def groups_per_step(self) -> int:
        return self.step_columns // self.group

    @property
    def groups_per_run(self) -> int:
        """Groups of a run: of a block, or of a step if there are no blocks."""
        return self.groups_per_block or self.groups_per_step

    @property
    def steps_per_run(self) -> int:
        return self.groups_per_run // self.groups_per_step

    @property
    def run_columns(self) -> int:
        return self.groups_per_run * self.group

    @property
    def code_columns(self) -> list[int]:
        """First columns of the vectors of `WeightTile.load_codes`, relative to that of the step."""
        if self.bits != 4:
            return list(range(0, self.step_columns, 4))
        vectors = range(self.step_columns // 8)
        return [vector // 4 * 32 + vector % 4 * 4 + half for vector in vectors for half in (0, 16)]


@dataclass(frozen=True)
class WeightTile:
    """Addresses of one tile (16 rows) of a weight."""

    program: Program
    layout: InterleavedLayout
    parts: dict[str, Value]

    @classmethod
    def from_parts(
        cls, p: Program, layout: InterleavedLayout, tile: Value, groups: Value, parts: list[Value]
    ) -> "WeightTile":
        """parts: addresses of the weight's parts, in the order of PART_NAMES."""
        count = groups * LANES  # scales of a tile
        scale_bytes = layout.scale_dtype.itemsize
        sizes: dict[str, Value] = {
            "q": count * (layout.group * layout.bits // 8),
            "scale": count * scale_bytes,
            "zero": count,
            "minimum": count * scale_bytes,
        }
        if layout.groups_per_block:
            block_bytes = groups / layout.groups_per_block * (2 * LANES)
            sizes |= {"block_scale": block_bytes, "block_minimum": block_bytes}
        addresses: dict[str, Value] = dict(zip(PART_NAMES, parts, strict=True))
        return cls(p, layout, {name: p.address(addresses[name], tile * size) for name, size in sizes.items()})

    def load_group(self, name: str, group: Value) -> Value:
        """Load a group's scale or minimum for each row, float32; with blocks, its int8 factor."""
        if self.layout.groups_per_block:
            return self.program.load_bytes(self.parts[name], group * LANES, signed=True).to_float32()
        dtype = self.layout.scale_dtype
        return self.program.load_floats(ELEMENT_TYPES[dtype], self.parts[name], group * (LANES * dtype.itemsize))

    def load_block(self, name: str, block: Value) -> Value:
        """Load a block's scale or minimum for each row, float16 -> float32."""
        return self.program.load_floats(HALF, self.parts[name], block * (2 * LANES))

    def load_zero(self, group: Value) -> Value:
        """Load a group's zero point for each row, int32."""
        return self.program.load_bytes(self.parts["zero"], group * LANES, signed=self.layout.bits == 8)

    def load_step(self, step: Value) -> Iterator[Value]:
        """Load the packed codes of a step, and prefetch those PREFETCH_BYTES later.

        LLVM moves no load across a prefetch. With few registers, a vector is therefore loaded where it is used:
        all at once, they would be spilled to the stack.
        """
        vectors = self.load_vectors(step)
        return vectors if self.program.variant in FEW_REGISTERS else iter(list(vectors))

    def load_codes(self, step: Value) -> Iterator[tuple[int, Value]]:
        """Load and unpack the codes of a step: vectors of bytes, four columns in each lane, with the first column.

        Codes of 8 bits are signed, others are not.
        """
        return zip(self.layout.code_columns, self.unpack_codes(step), strict=True)

    def unpack_codes(self, step: Value) -> Iterator[Value]:
        if self.layout.bits == 8:
            yield from self.load_step(step)
        elif self.layout.bits == 4:
            for packed in self.load_step(step):
                yield packed & 0x0F0F0F0F
                yield (packed >> 4) & 0x0F0F0F0F
        else:
            last: Value | None = None
            for i, packed in enumerate(self.load_step(step)):
                yield packed & 0x3F3F3F3F
                upper = (packed & UPPER_2) >> (6 - 2 * (i % 3))
                last = last | upper if last else upper
                if i % 3 == 2:
                    yield last
                    last = None

    def load_vectors(self, step: Value) -> Iterator[Value]:
        p, size = self.program, self.layout.step_columns * self.layout.bits // 8 * LANES
        begin = p.address(self.parts["q"], step * size)
        for offset in range(0, size, VECTOR_BYTES):
            vector = p.load(vector_type(INT), begin, offset)
            p.prefetch(begin, offset + PREFETCH_BYTES)
            yield vector

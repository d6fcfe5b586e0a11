"""What a program knows of a weight in lanes (localllm/quant/formats/lanes.py), and how it reads a tile of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.formats import gguf, lanes
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.int4 import INT4_ZERO_POINT
from localllm.quant.formats.lanes import empty_huge_pages
from localllm.quant.packing import INT4_INTERLEAVED, INT8_INTERLEAVED, INTERLEAVED_BITS, TILE_ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce
from localllm.runtime.kernels.cpu.ir import (
    BFLOAT,
    FLOAT,
    HALF,
    INT,
    LANES,
    SHORT,
    Element,
    Program,
    Value,
    vector_type,
)

# Rows of GGUF's Q4_0 and Q8_0 laid side by side: their bytes are in the order of lanes already, so that a
# program can move them as fast as memory takes them. All other formats `quant/formats/lanes.py` lays, with
# torch.
SCALE_BYTES, WORD_BYTES = 2, 4
CHUNK_BYTES = 2**24  # bytes of a file
INTERLEAVED_FORMAT = {"q4_0": INT4_INTERLEAVED, "q8_0": INT8_INTERLEAVED}


def emit_interleave(p: Program, words: int) -> None:
    """Rows of blocks, each a scale and `words` words -> q [tiles, blocks * words, 16, 4] and scale [tiles, blocks,
    16]"""
    rows, q, scale = p.load_addresses(3)
    tiles, blocks = p.load_counts(2, begin=3)
    size = SCALE_BYTES + WORD_BYTES * words
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), blocks) as block:
        at = tile * blocks + block
        for row in range(TILE_ROWS):
            here = p.address(rows, ((tile * TILE_ROWS + row) * blocks + block) * size)
            p.store(p.load(SHORT, here), scale, at * (SCALE_BYTES * TILE_ROWS) + SCALE_BYTES * row)
            for word in range(words):
                place = (at * words + word) * (WORD_BYTES * TILE_ROWS) + WORD_BYTES * row
                p.store(p.load(INT, here, SCALE_BYTES + WORD_BYTES * word), q, place)


@CompileOnce
def compile_interleave(words: int) -> CompiledKernel:
    return CompiledKernel(lambda p: emit_interleave(p, words), "lay", 5)


def interleave_weights(
    *weights: QuantizedTensor, on_read: Callable[[], None] = lanes.no_op
) -> QuantizedTensor | None:
    """As `lanes.to_lanes`."""
    first = weights[0]
    form = INTERLEAVED_FORMAT.get(first.format)
    whole = all(weight.format == first.format and weight.shape[0] % TILE_ROWS == 0 for weight in weights)
    if form is None or not whole or any(weight.shape[1] != first.shape[1] for weight in weights):
        return lanes.interleave(*weights, on_read=on_read)
    kind, rows = BLOCK_TYPE_BY_NAME[first.format], sum(weight.shape[0] for weight in weights)
    tiles, blocks, words = rows // TILE_ROWS, first.shape[1] // kind.block_elements, kind.block_bytes // WORD_BYTES
    q = empty_huge_pages((tiles, blocks * words, TILE_ROWS, WORD_BYTES), torch.uint8)
    scale = empty_huge_pages((tiles, blocks, TILE_ROWS), torch.float16)
    tile = 0
    for weight in weights:
        for some in split_tiles(weight.parts[gguf.BLOCKS_PART]):
            count = len(some) // TILE_ROWS
            compile_interleave(words)(some.data_ptr(), q[tile].data_ptr(), scale[tile].data_ptr(), count, blocks)
            tile += count
            on_read()
    parts = {"q": q if form == INT4_INTERLEAVED else q.view(torch.int8), "scale": scale}
    return QuantizedTensor(form, (rows, first.shape[1]), parts, kind.block_elements)


def split_tiles(rows: Tensor) -> list[Tensor]:
    """uint8 [out, bytes of a row], cut where tiles end."""
    return list(rows.contiguous().split(max(1, CHUNK_BYTES // rows.shape[1] // TILE_ROWS) * TILE_ROWS))


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

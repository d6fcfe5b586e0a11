"""The interleaved layout of quantized weights: converting weights to it, and reading a tile of it in IR.

`quant/formats/interleaved.py` defines the layout and converts every format with torch. Q4_0 and Q8_0 of GGUF have
their bytes in that order within a row already; a kernel here interleaves 16 rows of them at the speed of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.formats import gguf, interleaved
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.groups import INT4_ZERO_POINT
from localllm.quant.formats.interleaved import empty_huge_pages
from localllm.quant.packing import INT4_INTERLEAVED, INT8_INTERLEAVED, INTERLEAVED_BITS, TILE_ROWS
from localllm.quant.tensor import QuantizedTensor, no_op
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource
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

SCALE_BYTES, WORD_BYTES = 2, 4  # of a Q4_0 or Q8_0 block
CHUNK_BYTES = 2**24  # of a file, interleaved per call
INTERLEAVED_FORMAT = {"q4_0": INT4_INTERLEAVED, "q8_0": INT8_INTERLEAVED}
ELEMENT_TYPES: dict[torch.dtype, Element] = {torch.float32: FLOAT, torch.float16: HALF, torch.bfloat16: BFLOAT}
PART_NAMES: tuple[str, ...] = ("q", "scale", "zero", "minimum", "block_scale", "block_minimum")
VECTOR_BYTES = 64
PREFETCH_BYTES = 4096  # distance: a core reads INT4 at 12.5 GB/s with it, at 8.5 GB/s without


def emit_interleave(p: Program, words: int) -> None:
    """Rows of blocks, each a scale and `words` words -> q [tiles, blocks * words, 16, 4], scale [tiles, blocks,
    16].
    """
    rows, q, scale = p.load_addresses(3)
    tiles, blocks = p.load_counts(2, begin=3)
    size = SCALE_BYTES + WORD_BYTES * words
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), blocks) as block:
        index = tile * blocks + block
        for row in range(TILE_ROWS):
            source = p.address(rows, ((tile * TILE_ROWS + row) * blocks + block) * size)
            p.store(p.load(SHORT, source), scale, index * (SCALE_BYTES * TILE_ROWS) + SCALE_BYTES * row)
            for word in range(words):
                offset = (index * words + word) * (WORD_BYTES * TILE_ROWS) + WORD_BYTES * row
                p.store(p.load(INT, source, SCALE_BYTES + WORD_BYTES * word), q, offset)


@CompileOnce
def compile_interleave(words: int) -> KernelSource:
    return KernelSource(lambda p: emit_interleave(p, words), "interleave", 5)


def interleave_weights(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """Convert weights to the interleaved layout as one matrix, as `interleaved.interleave` does."""
    first = weights[0]
    target = INTERLEAVED_FORMAT.get(first.format)
    same_format = all(weight.format == first.format and weight.shape[0] % TILE_ROWS == 0 for weight in weights)
    if target is None or not same_format or any(weight.shape[1] != first.shape[1] for weight in weights):
        return interleaved.interleave(*weights, on_read=on_read)
    block, rows = BLOCK_TYPE_BY_NAME[first.format], sum(weight.shape[0] for weight in weights)
    tiles, blocks = rows // TILE_ROWS, first.shape[1] // block.block_elements
    words = block.block_bytes // WORD_BYTES
    q = empty_huge_pages((tiles, blocks * words, TILE_ROWS, WORD_BYTES), torch.uint8)
    scale = empty_huge_pages((tiles, blocks, TILE_ROWS), torch.float16)
    tile = 0
    for weight in weights:
        for chunk in split_tiles(weight.parts[gguf.BLOCKS_PART]):
            count = len(chunk) // TILE_ROWS
            compile_interleave(words)(chunk.data_ptr(), q[tile].data_ptr(), scale[tile].data_ptr(), count, blocks)
            tile += count
            on_read()
    parts = {"q": q if target == INT4_INTERLEAVED else q.view(torch.int8), "scale": scale}
    return QuantizedTensor(target, (rows, first.shape[1]), parts, block.block_elements)


def split_tiles(rows: Tensor) -> list[Tensor]:
    """Split uint8 [out, row bytes] into chunks of whole tiles."""
    return list(rows.contiguous().split(max(1, CHUNK_BYTES // rows.shape[1] // TILE_ROWS) * TILE_ROWS))


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
        return INT4_ZERO_POINT if self.bits == 4 and not self.minimum else 0

    @property
    def step_columns(self) -> int:
        """Columns per iteration of a kernel."""
        return max(self.group, 32) if self.bits == 4 else self.group

    @property
    def groups_per_step(self) -> int:
        return self.step_columns // self.group

    @property
    def shifts(self) -> tuple[int, ...]:
        """Right shifts that bring codes to the low bits of bytes: low nibbles and high nibbles, or bytes."""
        return (0, 4) if self.bits == 4 else (0,)

    def column(self, vector: int, half: int) -> int:
        """First column of a vector's codes (low or high nibbles), relative to the first column of the step."""
        if self.bits == 8:
            return 4 * vector
        return vector // 4 * 32 + vector % 4 * 4 + 16 * half


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

    def load_step(self, step: Value) -> list[Value]:
        """Load the packed codes of a step, and prefetch those PREFETCH_BYTES later."""
        p, size = self.program, self.layout.step_columns * self.layout.bits // 8 * LANES
        begin, vectors = p.address(self.parts["q"], step * size), []
        for offset in range(0, size, VECTOR_BYTES):
            vectors.append(p.load(vector_type(INT), begin, offset))
            p.prefetch(begin, offset + PREFETCH_BYTES)
        return vectors

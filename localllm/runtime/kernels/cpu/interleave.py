"""Conversion of GGUF blocks to the interleaved layout (`quant/formats/interleaved.py`), 16 rows at a time.

Kernels read the memory map once and write the final tensors: no copy is made in between. They are compiled for the
formats of most files; `interleaved.interleave` converts all others with torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.quant.formats import gguf, interleaved
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.formats.interleaved import empty_huge_pages
from localllm.quant.packing import (
    INT4_INTERLEAVED,
    INT6_INTERLEAVED,
    INT8_INTERLEAVED,
    INTERLEAVED_BITS,
    TILE_ROWS,
)
from localllm.quant.tensor import QuantizedTensor, no_op
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource
from localllm.runtime.kernels.cpu.ir import INT, LANES, SHORT, Program, Value

CHUNK_BYTES = 2**24  # of a file, interleaved per call
WORD_BYTES = 4  # four codes of 8 bits of a row, or eight of 4 bits
HALF_BYTES = 2  # of a float16 scale
# Masks of the same bits of four bytes.
BIT_1, BITS_2, BITS_4, BITS_6 = (0x01010101 * mask for mask in (1, 3, 15, 63))
UPPER_4, BITS_5_AND_6 = -0x0F0F0F10, 0x30303030  # the first is 0xF0F0F0F0 as int32


@dataclass(frozen=True)
class BlockRows:
    """One block of each of 16 rows: lane i of a loaded vector is of row i."""

    program: Program
    addresses: list[Value]

    def word(self, offset: int) -> Value:
        """Load four bytes of each block."""
        return self.program.gather(INT, self.addresses, offset)

    def half(self, offset: int) -> Value:
        """Load two bytes of each block as int16."""
        return self.program.gather(SHORT, self.addresses, offset)


Words = Iterator[tuple[int, Value]]  # vectors of a block's q with their index


def q4_0_words(rows: BlockRows) -> Words:
    return ((i, rows.word(2 + WORD_BYTES * i)) for i in range(4))


def q8_0_words(rows: BlockRows) -> Words:
    return ((i, rows.word(2 + WORD_BYTES * i)) for i in range(8))


def q4_k_words(rows: BlockRows) -> Words:
    """Codes of 64 columns are low and high nibbles of 32 bytes; interleaved, low and high are 16 columns apart."""
    for run in range(4):
        for i in range(4):
            first, second = (rows.word(16 + 32 * run + begin + WORD_BYTES * i) for begin in (0, 16))
            yield 8 * run + i, (first & BITS_4) | ((second & BITS_4) << 4)
            yield 8 * run + 4 + i, ((first >> 4) & BITS_4) | (second & UPPER_4)


def q5_k_words(rows: BlockRows) -> Words:
    """Bit r of 32 bytes is the fifth of run r of 32 columns."""
    for columns in range(2):  # of 16, in a run of 32
        words = range(4 * columns, 4 * columns + 4)
        fifths = [rows.word(16 + WORD_BYTES * i) for i in words]
        for run in range(8):
            lower = [rows.word(48 + 16 * (run // 2 * 2) + WORD_BYTES * i) for i in words]
            codes = [
                ((low >> (4 * (run % 2))) & BITS_4) | (((fifth >> run) & BIT_1) << 4)
                for low, fifth in zip(lower, fifths, strict=True)
            ]
            yield from pack_six_bits(2 * run + columns, codes)


def q6_k_words(rows: BlockRows) -> Words:
    """Two bits of 32 bytes are the upper bits of four runs of 32 columns."""
    for half in range(2):
        for columns in range(2):  # of 16, in a run of 32
            words = range(4 * columns, 4 * columns + 4)
            upper = [rows.word(128 + 32 * half + WORD_BYTES * i) for i in words]
            for run in range(4):
                lower = [rows.word(64 * half + 32 * (run % 2) + WORD_BYTES * i) for i in words]
                codes = [
                    ((low >> (4 * (run // 2))) & BITS_4) | (((high >> (2 * run)) & BITS_2) << 4)
                    for low, high in zip(lower, upper, strict=True)
                ]
                yield from pack_six_bits(8 * half + 2 * run + columns, codes)


def pack_six_bits(unit: int, codes: list[Value]) -> Words:
    """Pack four vectors of codes, those of 16 columns, into three."""
    *first, last = codes
    for i, code in enumerate(first):
        upper = (last & (BITS_2 << (2 * i))) << (6 - 2 * i)
        yield 3 * unit + i, code | upper


def k_quant_factors(rows: BlockRows) -> dict[str, list[Value]]:
    """Factors of Q4_K and Q5_K (`gguf.scales_and_minima`), four groups in a word."""
    scale, minimum, low_bits = (rows.word(offset) for offset in (4, 8, 12))
    return {
        "scale": [scale & BITS_6, (low_bits & BITS_4) | ((scale >> 2) & BITS_5_AND_6)],
        "minimum": [minimum & BITS_6, ((low_bits >> 4) & BITS_4) | ((minimum >> 2) & BITS_5_AND_6)],
    }


def q6_k_factors(rows: BlockRows) -> dict[str, list[Value]]:
    return {"scale": [rows.word(192 + WORD_BYTES * i) for i in range(4)]}


@dataclass(frozen=True)
class BlockConversion:
    """Conversion of the blocks of a format to an interleaved layout."""

    target: str  # format
    words: Callable[[BlockRows], Words]
    halves: dict[str, int]  # float16 parts, with their offsets in a block
    factors: Callable[[BlockRows], dict[str, list[Value]]] | None = None  # int8 parts
    groups: int = 1  # per block

    @property
    def part_names(self) -> list[str]:
        minimum = "block_minimum" in self.halves
        return ["q", *self.halves, *(("scale", "minimum")[: 1 + minimum] if self.factors else ())]


BLOCK_SCALE, BLOCK_SCALES = {"block_scale": 0}, {"block_scale": 0, "block_minimum": 2}
CONVERSIONS = {
    "q4_0": BlockConversion(INT4_INTERLEAVED, q4_0_words, {"scale": 0}),
    "q8_0": BlockConversion(INT8_INTERLEAVED, q8_0_words, {"scale": 0}),
    "q4_k": BlockConversion(INT4_INTERLEAVED, q4_k_words, BLOCK_SCALES, k_quant_factors, 8),
    "q5_k": BlockConversion(INT6_INTERLEAVED, q5_k_words, BLOCK_SCALES, k_quant_factors, 8),
    "q6_k": BlockConversion(INT6_INTERLEAVED, q6_k_words, {"block_scale": 208}, q6_k_factors, 16),
}


def emit_interleave(p: Program, block_format: str) -> None:
    """Rows of blocks -> the parts of CONVERSIONS[block_format] for whole tiles."""
    conversion, block = CONVERSIONS[block_format], BLOCK_TYPE_BY_NAME[block_format]
    rows, *addresses = p.load_addresses(1 + len(conversion.part_names))
    parts = dict(zip(conversion.part_names, addresses, strict=True))
    tiles, blocks = p.load_counts(2, begin=1 + len(conversion.part_names))
    q_bytes = block.block_elements * INTERLEAVED_BITS[conversion.target] // 8 * TILE_ROWS
    begin, end = p.part_range(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index_constant(0), blocks) as i:
        index = tile * blocks + i
        source = [
            p.address(rows, ((tile * TILE_ROWS + row) * blocks + i) * block.block_bytes) for row in range(LANES)
        ]
        block_rows = BlockRows(p, source)
        for word, value in conversion.words(block_rows):
            p.store(value, parts["q"], index * q_bytes + word * (WORD_BYTES * TILE_ROWS))
        for name, offset in conversion.halves.items():
            p.store(block_rows.half(offset), parts[name], index * (HALF_BYTES * TILE_ROWS))
        for name, words in (conversion.factors(block_rows) if conversion.factors else {}).items():
            for group in range(conversion.groups):
                factor = words[group // WORD_BYTES] >> (8 * (group % WORD_BYTES))
                p.store_bytes(factor, parts[name], (index * conversion.groups + group) * TILE_ROWS)


@CompileOnce
def compile_interleave(block_format: str) -> KernelSource:
    arguments = 1 + len(CONVERSIONS[block_format].part_names) + 2
    return KernelSource(lambda p: emit_interleave(p, block_format), "interleave", arguments)


def interleave_weights(*weights: QuantizedTensor, on_read: Callable[[], None] = no_op) -> QuantizedTensor | None:
    """Convert weights to the interleaved layout as one matrix, as `interleaved.interleave` does."""
    first = weights[0]
    conversion = CONVERSIONS.get(first.format)
    same_format = all(weight.format == first.format and weight.shape[0] % TILE_ROWS == 0 for weight in weights)
    if conversion is None or not same_format or any(weight.shape[1] != first.shape[1] for weight in weights):
        return interleaved.interleave(*weights, on_read=on_read)
    block, rows = BLOCK_TYPE_BY_NAME[first.format], sum(weight.shape[0] for weight in weights)
    tiles, blocks = rows // TILE_ROWS, first.shape[1] // block.block_elements
    vectors = first.shape[1] * INTERLEAVED_BITS[conversion.target] // 8 // WORD_BYTES
    q_dtype = torch.int8 if conversion.target == INT8_INTERLEAVED else torch.uint8
    parts = {"q": empty_huge_pages((tiles, vectors, TILE_ROWS, WORD_BYTES), q_dtype)}
    for name in conversion.part_names[1:]:
        half = name in conversion.halves
        columns = blocks if half else blocks * conversion.groups
        parts[name] = empty_huge_pages((tiles, columns, TILE_ROWS), torch.float16 if half else torch.int8)
    convert, tile = compile_interleave(first.format), 0
    for weight in weights:
        for chunk in split_tiles(weight.parts[gguf.BLOCKS_PART]):
            count = len(chunk) // TILE_ROWS
            convert(chunk.data_ptr(), *(part[tile].data_ptr() for part in parts.values()), count, blocks)
            tile += count
            on_read()
    return QuantizedTensor(
        conversion.target, (rows, first.shape[1]), parts, block.block_elements // conversion.groups
    )


def split_tiles(rows: Tensor) -> list[Tensor]:
    """Split uint8 [out, row bytes] into chunks of whole tiles."""
    return list(rows.contiguous().split(max(1, CHUNK_BYTES // rows.shape[1] // TILE_ROWS) * TILE_ROWS))

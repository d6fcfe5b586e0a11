"""Rows of GGUF's Q4_0 and Q8_0 laid side by side: their bytes are in the order of lanes already, so that a
program can move them as fast as memory takes them. All other formats `quant/formats/lanes.py` lays, with torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.formats import gguf, lanes
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME
from localllm.quant.memory import empty_huge_pages
from localllm.quant.packing import INT4_INTERLEAVED, INT8_INTERLEAVED, TILE_ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu.compile import CompiledKernel, CompileOnce
from localllm.runtime.kernels.cpu.ir import INT, SHORT, Program

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

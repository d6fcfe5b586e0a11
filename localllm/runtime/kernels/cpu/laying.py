"""Rows of GGUF's Q4_0 and Q8_0 laid side by side: their bytes are in the order of lanes already, so that a
program can move them as fast as memory takes them. All other formats `quant/formats/lanes.py` lays, with torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.quant.formats import gguf, lanes
from localllm.quant.formats.gguf_types import BY_NAME
from localllm.quant.memory import large
from localllm.quant.packing import INT4_LANES, INT8_LANES, ROWS
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu.compile import Compiled, Once
from localllm.runtime.kernels.cpu.program import INT, SHORT, Program

SCALE_BYTES, WORD_BYTES = 2, 4
READ_AT_ONCE = 2**24  # bytes of a file
AS_THEY_LIE = {"q4_0": INT4_LANES, "q8_0": INT8_LANES}


def lay_blocks(p: Program, words: int) -> None:
    """Rows of blocks, each a scale and `words` words -> q [tiles, blocks * words, 16, 4] and scale [tiles, blocks,
    16]"""
    rows, q, scale = p.addresses(3)
    tiles, blocks = p.counts(2, begin=3)
    size = SCALE_BYTES + WORD_BYTES * words
    begin, end = p.share(tiles)
    with p.loop(begin, end) as tile, p.loop(p.index(0), blocks) as block:
        at = tile * blocks + block
        for row in range(ROWS):
            here = p.at(rows, ((tile * ROWS + row) * blocks + block) * size)
            p.store(p.load(SHORT, here), scale, at * (SCALE_BYTES * ROWS) + SCALE_BYTES * row)
            for word in range(words):
                place = (at * words + word) * (WORD_BYTES * ROWS) + WORD_BYTES * row
                p.store(p.load(INT, here, SCALE_BYTES + WORD_BYTES * word), q, place)


@Once
def program(words: int) -> Compiled:
    return Compiled(lambda p: lay_blocks(p, words), "lay", 5)


def laid(*weights: QuantizedTensor, between: Callable[[], None] = lanes.nothing) -> QuantizedTensor | None:
    """As `lanes.to_lanes`."""
    first = weights[0]
    form = AS_THEY_LIE.get(first.format)
    whole = all(weight.format == first.format and weight.shape[0] % ROWS == 0 for weight in weights)
    if form is None or not whole or any(weight.shape[1] != first.shape[1] for weight in weights):
        return lanes.to_lanes(*weights, between=between)
    kind, rows = BY_NAME[first.format], sum(weight.shape[0] for weight in weights)
    tiles, blocks, words = rows // ROWS, first.shape[1] // kind.elements, kind.block_bytes // WORD_BYTES
    q = large((tiles, blocks * words, ROWS, WORD_BYTES), torch.uint8)
    scale = large((tiles, blocks, ROWS), torch.float16)
    tile = 0
    for weight in weights:
        for some in pieces(weight.parts[gguf.PART]):
            count = len(some) // ROWS
            program(words)(some.data_ptr(), q[tile].data_ptr(), scale[tile].data_ptr(), count, blocks)
            tile += count
            between()
    parts = {"q": q if form == INT4_LANES else q.view(torch.int8), "scale": scale}
    return QuantizedTensor(form, (rows, first.shape[1]), parts, kind.elements)


def pieces(rows: Tensor) -> list[Tensor]:
    """uint8 [out, bytes of a row], cut where tiles end."""
    return list(rows.contiguous().split(max(1, READ_AT_ONCE // rows.shape[1] // ROWS) * ROWS))

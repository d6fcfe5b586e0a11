"""Tile sizes for products with few rows: as measured (tiles.toml), or by a rule if none was measured."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localllm.runtime.kernels.gpu.launch import Gpu

TILES_PATH = Path(__file__).with_name("tiles.toml")
# Instructions before and after the loop of a program, in chunks; with splits, it also adds up partial sums.
PROGRAM_CHUNKS, SPLIT_PROGRAM_CHUNKS = 1, 2
SMALL_ROWS = 4096  # rows of W: below, tiles of 64 are too few for all multiprocessors


@dataclass(frozen=True)
class Tile:
    block_rows: int  # rows of W per program
    warps: int
    stages: int
    splits: int  # maximum number of parts that columns are split into


@dataclass(frozen=True)
class TileGrid:
    """`tiles` tiles of block_rows rows, each in `splits` parts of `chunks_per_split` column chunks or fewer."""

    tiles: int
    splits: int
    chunks_per_split: int


def tile_for(gpu: Gpu, kind: str, rows: int, columns: int, chunks: int) -> Tile:
    """Return the tile for a product.

    kind: storage type of W, `int4`, `int8`, `bfloat16`, ...; `float32` if x is.
    """
    return measured_tiles().get((gpu.arch, kind, rows, columns)) or default_tile(gpu, kind, rows, chunks)


def default_tile(gpu: Gpu, kind: str, rows: int, chunks: int) -> Tile:
    """Return a tile by estimates only.

    x is read again for each block: at M = 16 and for 64 rows of INT4 as many bytes as W, but from L2. Two warps
    use mma.sync on every architecture (wgmma needs four), and with 32 rows each they reuse x's fragments for twice
    the weights.
    """
    if kind == "float32":  # no tensor cores
        block, warps, stages = 32, 4, 2
    elif kind in ("int4", "int8"):
        # With 4 stages instead of 3, an H100 multiplied 128,256 rows of INT8 in 193 us instead of 258; from sm_100
        # to sm_103, 3 spill with Triton 3.6.
        block, warps, stages = (64 if rows >= SMALL_ROWS else 32), 2, 4 if gpu.arch in (90, 100, 103) else 3
    else:
        block, warps, stages = 32, 2, 4
    return Tile(block, warps, stages, default_splits(-(-rows // block), chunks, gpu.multiprocessors))


def default_splits(tiles: int, chunks: int, multiprocessors: int) -> int:
    """Return into how many parts columns are split, so that the busiest multiprocessor has the least work.

    It has two programs, if each has at least two chunks: one waits while the other computes.
    """
    most = max(1, chunks // 2)
    if tiles >= 2 * multiprocessors:
        return 1

    def programs(splits: int) -> int:
        return -(-tiles * splits // multiprocessors)

    def work(splits: int) -> int:
        share = -(-chunks // splits)
        return programs(-(-chunks // share)) * (share + (SPLIT_PROGRAM_CHUNKS if splits > 1 else PROGRAM_CHUNKS))

    return min((splits for splits in range(1, most + 1) if programs(splits) >= 2), key=work, default=most)


def tile_grid(tile: Tile, rows: int, chunks: int) -> TileGrid:
    share = -(-chunks // tile.splits)
    return TileGrid(-(-rows // tile.block_rows), -(-chunks // share), share)


@cache
def measured_tiles() -> dict[tuple[int, str, int, int], Tile]:
    return {
        (row["arch"], row["kind"], row["rows"], row["columns"]): Tile(
            row["block"], row["warps"], row["stages"], row["splits"]
        )
        for row in tomllib.loads(TILES_PATH.read_text()).get("tile", [])
    }

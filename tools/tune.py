"""Measures the tiles of products with few rows on the GPU that is here, and writes them to
localllm/runtime/kernels/gpu/tiles.toml; rows of other architectures stay as they are.

    python tools/tune.py [--rows 4096 --columns 14336] [--kind int4] [--tokens 1]

Candidates are compiled on all cores. Those of a shape are timed in turn, round after round, each in a captured
graph over so many copies of the weight that no cache holds them; the median decides.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.hardware.catalog import MIN_GPU_ARCH  # noqa: E402
from localllm.quant.formats.gpu_packed import pack_codes  # noqa: E402
from localllm.quant.tensor import QuantizedTensor  # noqa: E402
from localllm.runtime.kernels.gpu import small_m_linear, small_m_packed  # noqa: E402
from localllm.runtime.kernels.gpu.launch import (  # noqa: E402
    BITS,
    Gpu,
    gpu_of,
    meta_packed_weight,
    meta_tensor,
    record_launches,
)
from localllm.runtime.kernels.gpu.small_m import MAX_TICKETS  # noqa: E402
from localllm.runtime.kernels.gpu.tiles import TILES_PATH, Tile, measured_tiles  # noqa: E402
from tools.triton_aot import compilation_key, compile_all  # noqa: E402

SHAPES = [  # [out, in] of Llama 1B, 8B and a model of 32B: q with k and v, o, gate with up, down, head
    *[(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    *[(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600), (151936, 5120)],
]
KINDS = ("int4", "int8", "bfloat16")
GROUPS = {"int4": 128, "int8": None}  # columns that share a scale, None: all; kinds in the packed layout
CACHE_BYTES = 2**28  # more than any L2
ROUNDS = 15


def candidates(kind: str, rows: int) -> Iterator[Tile]:
    """Tiles for a matrix of so many rows; columns are only split among programs that there are tickets for."""
    blocks = (32, 64, 128) if kind != "bfloat16" else (16, 32, 64)
    cuts = (1, 2, 3, 4, 6, 8, 12, 16)
    for block, warps, stages, splits in itertools.product(blocks, (2, 4), (2, 3, 4, 5), cuts):
        # A warp has 16 rows at least.
        if block >= 16 * warps and (splits == 1 or -(-rows // block) <= MAX_TICKETS):
            yield Tile(block, warps, stages, splits)


def multiply(x: Tensor, weight: Tensor | QuantizedTensor, tile: Tile) -> None:
    if isinstance(weight, QuantizedTensor):
        small_m_packed.packed_matmul(x, weight, tile=tile)
    else:
        small_m_linear.dense_matmul(x, weight, tile=tile)


def compile_candidates(gpu: Gpu, cases: Iterable[tuple[str, int, int]], tokens: int) -> None:
    """Compile the candidates of all kinds and shapes into Triton's cache."""
    with record_launches(gpu) as launches:
        for kind, rows, columns in cases:
            x = meta_tensor(tokens, columns)
            packed = kind in GROUPS
            weight = (
                meta_packed_weight(kind, rows, columns, GROUPS[kind]) if packed else meta_tensor(rows, columns)
            )
            for tile in candidates(kind, rows):
                multiply(x, weight, tile)
    unique = {compilation_key(launch): launch for launch in launches}
    compile_all(unique.values(), gpu, os.cpu_count() or 1)


def weights_of(kind: str, rows: int, columns: int) -> list[Tensor | QuantizedTensor]:
    def made() -> Tensor | QuantizedTensor:
        if kind not in GROUPS:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        bits, group = BITS[kind], GROUPS[kind]
        codes = torch.randint(0, 16, (rows, columns), device="cuda", dtype=torch.uint8)
        scale = torch.rand(rows, columns // (group or columns), device="cuda").bfloat16()
        return pack_codes(codes, group, bits, scale=scale)

    first = made()
    return [first] + [made() for _ in range(max(1, CACHE_BYTES // first.nbytes))]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, products: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / products


def best(kind: str, rows: int, columns: int, tokens: int) -> tuple[Tile, float]:
    weights = weights_of(kind, rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    graphs: dict[Tile, torch.cuda.CUDAGraph] = {}
    for tile in candidates(kind, rows):

        def run(tile: Tile = tile) -> None:
            for weight in weights:
                multiply(x, weight, tile)

        try:
            graphs[tile] = captured(run)
        except Exception as error:
            # Triton says so itself where a tile wants more shared memory or registers than there are.
            if "out of resource" not in str(error):
                raise
    times: dict[Tile, list[float]] = {tile: [] for tile in graphs}
    for _ in range(ROUNDS):
        for tile, graph in graphs.items():
            times[tile].append(microseconds(graph, len(weights)))
    return min(((tile, statistics.median(found)) for tile, found in times.items()), key=lambda pair: pair[1])


def write(table: dict[tuple[int, str, int, int], Tile]) -> None:
    comment = [line for line in TILES_PATH.read_text().splitlines() if line.startswith("#")]
    lines = ["\n".join(comment[:2]).replace(" No GPU has been measured yet.", "")]
    for (arch, kind, rows, columns), tile in sorted(table.items()):
        lines.append(
            f'[[tile]]\narch = {arch}\nkind = "{kind}"\nrows = {rows}\ncolumns = {columns}\n'
            f"block = {tile.block_rows}\nwarps = {tile.warps}\nstages = {tile.stages}\nsplits = {tile.splits}"
        )
    TILES_PATH.write_text("\n\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--tokens", type=int, default=1)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune.py measures on a GPU, and none is here", file=sys.stderr)
        return 3
    gpu = gpu_of(torch.device("cuda"))
    if gpu.arch < MIN_GPU_ARCH:
        print(f"the kernels need sm_{MIN_GPU_ARCH} or newer, not sm_{gpu.arch}", file=sys.stderr)
        return 3
    shapes = [(asked.rows, asked.columns)] if asked.rows and asked.columns else SHAPES
    cases = [(kind, rows, columns) for (rows, columns) in shapes for kind in asked.kind or KINDS]
    compile_candidates(gpu, cases, asked.tokens)
    table = dict(measured_tiles())
    for kind, rows, columns in cases:
        tile, time = best(kind, rows, columns, asked.tokens)
        table[gpu.arch, kind, rows, columns] = tile
        write(table)
        print(f"{kind} {rows} x {columns}: {time:.2f} us, {tile}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

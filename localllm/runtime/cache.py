"""What one layer keeps: keys and values or latents in the blocks of the pool, or a recurrent state in its rows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, Mixer, RecurrentConfig
from localllm.quant.vectors import MOST, SCALE, quantize
from localllm.runtime.places import ZEROS
from localllm.runtime.tiered_rows import tiers
from localllm.runtime.tiers import Run


class KVCache:
    """k, v: [blocks * block_size, kv_heads, head_dim]; row `block * block_size + offset` is called a slot.

    In 8 bits k_scale and v_scale are [slots, kv_heads] bfloat16: one for each vector, so that a slot is written
    and copied without its neighbours; else they are None.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
    ):
        """spare: blocks behind those that have numbers, for what nobody will read."""
        self.block_size = block_size
        shape = ((blocks + spare) * block_size, kv_heads, head_dim)
        # Not zeroed: on the CPU memory is then taken as it is written, and no slot is read before that.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.k_scale = empty_scales(self.k, kv_heads)
        self.v_scale = empty_scales(self.v, kv_heads)
        self.tiers = tiers((self.k, self.v, self.k_scale, self.v_scale), blocks, block_size)

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; slot: [T]"""
        for stored, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scales is not None:
                x, scale = quantize(x, stored.dtype)
                scales.index_copy_(0, slot, scale)
            bits_of(stored).index_copy_(0, slot, bits_of(x))

    def copy_blocks(self, run: Run) -> None:
        for rows in self.tiers:
            rows.copy(run)


class LatentCache:
    """rows: [blocks * block_size, kv_lora_rank + rope_dim], a token's latent and its rotated key.

    In 8 bits scale is [slots, 2] bfloat16: the latent's, which comes out of a norm, and the key's, which does not;
    else it is None.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
    ):
        """widths: of the latent and of the key; spare: as of KVCache."""
        self.block_size = block_size
        self.widths = widths
        self.rows = torch.empty((blocks + spare) * block_size, sum(widths), dtype=dtype, device=device)
        self.scale = empty_scales(self.rows, len(widths))
        self.tiers = tiers((self.rows, self.scale), blocks, block_size)

    def append(self, rows: Tensor, slot: Tensor) -> None:
        """rows: [T, kv_lora_rank + rope_dim]; slot: [T]"""
        if self.scale is not None:
            parts, scales = zip(
                *(quantize(part, self.rows.dtype) for part in rows.split(self.widths, -1)), strict=True
            )
            self.scale.index_copy_(0, slot, torch.stack(scales, -1))
            rows = torch.cat([bits_of(part) for part in parts], -1)
        bits_of(self.rows).index_copy_(0, slot, bits_of(rows))

    def copy_blocks(self, run: Run) -> None:
        for rows in self.tiers:
            rows.copy(run)


class RecurrentCache:
    """conv: [rows, kernel - 1, channels], the last inputs of the convolution; matrix: [rows, *config.matrix]
    float32, what a delta net remembers."""

    def __init__(self, rows: int, config: RecurrentConfig, dtype: torch.dtype, device: torch.device):
        self.conv = torch.empty(rows, config.kernel - 1, config.channels, dtype=dtype, device=device)
        self.matrix = torch.empty(rows if config.matrix else 0, *config.matrix, device=device)

    def copy_row(self, source: int, target: int) -> None:
        for rows in (self.conv, self.matrix):
            if len(rows):
                rows[target] = 0 if source == ZEROS else rows[source]


PagedCache = KVCache | LatentCache
LayerCache = PagedCache | RecurrentCache


def make_caches(
    mixers: Iterable[Mixer],
    blocks: int,
    block_size: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    spare: int = 0,
) -> list[LayerCache]:
    """Each layer's; one that reads another's keys and values has that one's. `rows`: of recurrent states.

    kv_dtype: of keys, values and latents; None: as `dtype`, which recurrent states have; spare: blocks and rows
    behind those that have numbers, for what nobody will read.
    """
    kept = kv_dtype or dtype
    caches: list[LayerCache] = []
    for c in mixers:
        if isinstance(c, RecurrentConfig):
            caches.append(RecurrentCache(rows + spare, c, dtype, device))
        elif isinstance(c, LatentConfig):
            caches.append(LatentCache(blocks, block_size, (c.kv_lora_rank, c.rope_dim), kept, device, spare))
        elif c.kv_source is None:
            caches.append(KVCache(blocks, block_size, c.kv_heads, c.head_dim, kept, device, spare))
        else:
            caches.append(caches[c.kv_source])
    return caches


def empty_scales(rows: Tensor, vectors: int) -> Tensor | None:
    """For so many vectors of each row, if rows are in 8 bits."""
    return rows.new_empty(len(rows), vectors, dtype=SCALE) if rows.dtype in MOST else None


def bits_of(rows: Tensor) -> Tensor:
    """What torch can gather and scatter: on a CPU floats of 8 bits only as integers."""
    return rows.view(torch.int8) if rows.dtype in MOST else rows

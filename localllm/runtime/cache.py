"""What one layer keeps: keys and values or latents in the blocks of the pool, or a recurrent state in its rows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, Mixer, RecurrentConfig
from localllm.runtime.places import ZEROS


class KVCache:
    """k, v: [blocks * block_size, kv_heads, head_dim]; row `block * block_size + offset` is called a slot."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        shape = (blocks * block_size, kv_heads, head_dim)
        # Not zeroed: on the CPU memory is then taken as it is written, and no slot is read before that.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; slot: [T]"""
        self.k.index_copy_(0, slot, k)
        self.v.index_copy_(0, slot, v)

    def copy_block(self, source: int, target: int) -> None:
        for rows in (self.k, self.v):
            copy_block(rows, self.block_size, source, target)


class LatentCache:
    """rows: [blocks * block_size, kv_lora_rank + rope_dim], a token's latent and its rotated key."""

    def __init__(self, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device):
        self.block_size = block_size
        self.rows = torch.empty(blocks * block_size, width, dtype=dtype, device=device)

    def append(self, rows: Tensor, slot: Tensor) -> None:
        """rows: [T, kv_lora_rank + rope_dim]; slot: [T]"""
        self.rows.index_copy_(0, slot, rows)

    def copy_block(self, source: int, target: int) -> None:
        copy_block(self.rows, self.block_size, source, target)


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
    mixers: Iterable[Mixer], blocks: int, block_size: int, rows: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Each layer's; one that reads another's keys and values has that one's. `rows`: of recurrent states."""
    caches: list[LayerCache] = []
    for c in mixers:
        if isinstance(c, RecurrentConfig):
            caches.append(RecurrentCache(rows, c, dtype, device))
        elif isinstance(c, LatentConfig):
            caches.append(LatentCache(blocks, block_size, c.kv_lora_rank + c.rope_dim, dtype, device))
        elif c.kv_source is None:
            caches.append(KVCache(blocks, block_size, c.kv_heads, c.head_dim, dtype, device))
        else:
            caches.append(caches[c.kv_source])
    return caches


def copy_block(rows: Tensor, size: int, source: int, target: int) -> None:
    rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

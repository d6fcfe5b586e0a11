"""What one layer keeps of every token, in the blocks of the pool."""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, Mixer


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


LayerCache = KVCache | LatentCache


def make_caches(
    mixers: Iterable[Mixer], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Each layer's; one that reads another's keys and values has that one's."""
    caches: list[LayerCache] = []
    for c in mixers:
        if isinstance(c, LatentConfig):
            caches.append(LatentCache(blocks, block_size, c.kv_lora_rank + c.rope_dim, dtype, device))
        elif c.kv_source is None:
            caches.append(KVCache(blocks, block_size, c.kv_heads, c.head_dim, dtype, device))
        else:
            caches.append(caches[c.kv_source])
    return caches


def copy_block(rows: Tensor, size: int, source: int, target: int) -> None:
    rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

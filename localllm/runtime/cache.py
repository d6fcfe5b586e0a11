"""Keys and values of one layer, in the blocks of the pool."""

import torch
from torch import Tensor


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
        size = self.block_size
        for rows in (self.k, self.v):
            rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]

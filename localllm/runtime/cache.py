"""What one layer keeps: keys and values in the blocks of the pool, or a recurrent state in its rows."""

import torch
from torch import Tensor

from localllm.arch.config import RecurrentConfig
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
        size = self.block_size
        for rows in (self.k, self.v):
            rows[target * size : (target + 1) * size] = rows[source * size : (source + 1) * size]


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

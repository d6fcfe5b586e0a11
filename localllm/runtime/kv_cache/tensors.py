"""What one layer keeps: keys and values or latents in the blocks of the pool, or a recurrent state in its rows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, Mixer, RecurrentConfig
from localllm.quant.vectors import DTYPE_MAX, SCALE_DTYPE, quantize_vectors
from localllm.runtime.kv_cache.blocks import ZERO_SOURCE
from localllm.runtime.kv_cache.tiers import CopyRun

# The tensors behind `tiers.py`: a cache's rows on the device, and in pinned memory those of blocks put aside.
#
# Copies are asked of the device and not waited for. It does them in the order of its other work, so a block may
# be written to by the step that follows its copy, and the host, which never reads what is aside, need not know
# when.
HOST_CHUNK_BLOCKS = (
    64  # blocks aside that are allocated together, when the first of them is needed: to pin memory takes time
)


class TieredTensor:
    """on_device: [slots, ...] on the device, those of `device_blocks` blocks first. Blocks with higher numbers
    are aside."""

    def __init__(self, on_device: Tensor, device_blocks: int, block_size: int):
        self.on_device = on_device
        self.block_size = block_size
        self.device_blocks = device_blocks
        self.host_chunks: dict[int, Tensor] = {}

    def copy(self, run: CopyRun) -> None:
        """Within a tier or between the two."""
        source, target, count = run
        while count:
            read, written = self.slots_from(source), self.slots_from(target)
            some = min(count * self.block_size, len(read), len(written))
            written[:some].copy_(read[:some], non_blocking=True)
            blocks = some // self.block_size
            source, target, count = source + blocks, target + blocks, count - blocks

    def slots_from(self, block: int) -> Tensor:
        """Its rows, and those of the blocks behind it that lie in one piece with it."""
        if block < self.device_blocks:
            return self.on_device[block * self.block_size :]
        piece, inside = divmod(block - self.device_blocks, HOST_CHUNK_BLOCKS)
        if piece not in self.host_chunks:
            shape = (HOST_CHUNK_BLOCKS * self.block_size, *self.on_device.shape[1:])
            self.host_chunks[piece] = torch.empty(
                shape, dtype=self.on_device.dtype, pin_memory=self.on_device.is_cuda
            )
        return self.host_chunks[piece][inside * self.block_size :]


def tiered_tensors(tensors: Iterable[Tensor | None], blocks: int, block_size: int) -> list[TieredTensor]:
    return [TieredTensor(each, blocks, block_size) for each in tensors if each is not None]


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
        padding_blocks: int = 0,
    ):
        """padding_blocks: blocks behind those that have numbers, for what nobody will read."""
        self.block_size = block_size
        shape = ((blocks + padding_blocks) * block_size, kv_heads, head_dim)
        # Not zeroed: on the CPU memory is then taken as it is written, and no slot is read before that.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.k_scale = empty_scales(self.k, kv_heads)
        self.v_scale = empty_scales(self.v, kv_heads)
        self.tiered = tiered_tensors((self.k, self.v, self.k_scale, self.v_scale), blocks, block_size)

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """k, v: [T, kv_heads, head_dim]; slot: [T]"""
        for stored, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scales is not None:
                x, scale = quantize_vectors(x, stored.dtype)
                scales.index_copy_(0, slot, scale)
            as_bits(stored).index_copy_(0, slot, as_bits(x))

    def copy_blocks(self, run: CopyRun) -> None:
        for rows in self.tiered:
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
        latent_widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        padding_blocks: int = 0,
    ):
        """latent_widths: of the latent and of the key; padding_blocks: as of KVCache."""
        self.block_size = block_size
        self.latent_widths = latent_widths
        self.latents = torch.empty(
            (blocks + padding_blocks) * block_size, sum(latent_widths), dtype=dtype, device=device
        )
        self.scale = empty_scales(self.latents, len(latent_widths))
        self.tiered = tiered_tensors((self.latents, self.scale), blocks, block_size)

    def append(self, latents: Tensor, slot: Tensor) -> None:
        """latents: [T, kv_lora_rank + rope_dim]; slot: [T]"""
        if self.scale is not None:
            parts, scales = zip(
                *(quantize_vectors(part, self.latents.dtype) for part in latents.split(self.latent_widths, -1)),
                strict=True,
            )
            self.scale.index_copy_(0, slot, torch.stack(scales, -1))
            latents = torch.cat([as_bits(part) for part in parts], -1)
        as_bits(self.latents).index_copy_(0, slot, as_bits(latents))

    def copy_blocks(self, run: CopyRun) -> None:
        for rows in self.tiered:
            rows.copy(run)


class RecurrentCache:
    """conv: [rows, kernel - 1, channels], the last inputs of the convolution; matrix: [rows, *config.state_shape]
    float32, what a delta net remembers."""

    def __init__(self, slots: int, config: RecurrentConfig, dtype: torch.dtype, device: torch.device):
        self.conv = torch.empty(slots, config.kernel_size - 1, config.channels, dtype=dtype, device=device)
        self.matrix = torch.empty(slots if config.state_shape else 0, *config.state_shape, device=device)

    def copy_state(self, source: int, target: int) -> None:
        for rows in (self.conv, self.matrix):
            if len(rows):
                rows[target] = 0 if source == ZERO_SOURCE else rows[source]


PagedCache = KVCache | LatentCache
LayerCache = PagedCache | RecurrentCache


def make_caches(
    mixers: Iterable[Mixer],
    blocks: int,
    block_size: int,
    state_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> list[LayerCache]:
    """Each layer's; one that reads another's keys and values has that one's. `state_slots`: of recurrent states.

    kv_dtype: of keys, values and latents; None: as `dtype`, which recurrent states have; padding: blocks and rows
    behind those that have numbers, for what nobody will read.
    """
    kept = kv_dtype or dtype
    caches: list[LayerCache] = []
    for c in mixers:
        if isinstance(c, RecurrentConfig):
            caches.append(RecurrentCache(state_slots + padding, c, dtype, device))
        elif isinstance(c, LatentConfig):
            caches.append(LatentCache(blocks, block_size, (c.kv_lora_rank, c.rope_dim), kept, device, padding))
        elif c.kv_source is None:
            caches.append(KVCache(blocks, block_size, c.kv_heads, c.head_dim, kept, device, padding))
        else:
            caches.append(caches[c.kv_source])
    return caches


def empty_scales(stored: Tensor, vectors: int) -> Tensor | None:
    """For so many vectors of each row, if rows are in 8 bits."""
    return stored.new_empty(len(stored), vectors, dtype=SCALE_DTYPE) if stored.dtype in DTYPE_MAX else None


def as_bits(stored: Tensor) -> Tensor:
    """What torch can gather and scatter: on a CPU floats of 8 bits only as integers."""
    return stored.view(torch.int8) if stored.dtype in DTYPE_MAX else stored

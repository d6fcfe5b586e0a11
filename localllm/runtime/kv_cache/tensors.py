"""The cache tensors of one layer: keys and values or latents in the pool's blocks, or recurrent states in
slots.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike

import numpy as np
import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, Mixer, RecurrentConfig
from localllm.quant.vectors import (
    DTYPE_MAX,
    INT4,
    SCALE_DTYPE,
    KVDtype,
    quantize_vectors,
    rotate_vectors,
    rotation_size,
)
from localllm.runtime.kv_cache.blocks import ZERO_SOURCE
from localllm.runtime.kv_cache.tiers import CopyRun

HOST_CHUNK_BLOCKS = 64  # host blocks that are allocated at once when first needed, as pinning memory is slow


class KVCache:
    """k, v: [blocks * block_size, kv_heads, head_dim]; index `block * block_size + offset` is called a slot.

    In 8 bits, k_scale and v_scale are [slots, kv_heads] bfloat16: one per vector, so that a slot is written and
    copied without its neighbours. In 4 bits, k or v is [slots, kv_heads, head_dim / 2], and its scale [slots,
    kv_heads, 2] with an offset. Otherwise they are None. With values in 4 bits, keys are rotated before they are
    rounded (`rotate_vectors`), and queries must be, too.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: KVDtype,
        device: torch.device,
        padding_blocks: int = 0,
    ):
        """padding_blocks: additional blocks that padding writes to and nothing reads."""
        self.block_size = block_size
        slots = (blocks + padding_blocks) * block_size
        k_dtype, v_dtype = dtype if isinstance(dtype, tuple) else (dtype, dtype)
        self.rotation = rotation_size(head_dim) if v_dtype == INT4 else 1  # adjacent dimensions of a key
        # Not zeroed: on a CPU, memory is then committed as it is written, and no slot is read before.
        self.k, self.v = (
            torch.empty(slots, kv_heads, stored_width(head_dim, each), dtype=each, device=device)
            for each in (k_dtype, v_dtype)
        )
        self.k_scale = empty_scales(self.k, kv_heads)
        self.v_scale = empty_scales(self.v, kv_heads)
        self.tiered = tiered_tensors((self.k, self.v, self.k_scale, self.v_scale), blocks, block_size)

    def append(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        """Write keys and values of new tokens. k, v: [T, kv_heads, head_dim]; slot: [T]"""
        k = self.rotate(k)
        for stored, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scales is not None:
                x, scale = quantize_vectors(x, stored.dtype)
                scales.index_copy_(0, slot, scale)
            as_bits(stored).index_copy_(0, slot, as_bits(x))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys [..., head_dim] as keys are stored; the result is in float32 if they are."""
        return rotate_vectors(x, self.rotation) if self.rotation > 1 else x

    def copy_blocks(self, run: CopyRun) -> None:
        for tensor in self.tiered:
            tensor.copy(run)


class LatentCache:
    """latents: [blocks * block_size, kv_lora_rank + rope_dim], the latent and the rotated key of each token.

    In 8 bits, scale is [slots, 2] bfloat16: one for the latent, which is normalized, and one for the key, which is
    not; otherwise it is None.
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
        """latent_widths: of the latent and of the key; padding_blocks: see KVCache."""
        self.block_size = block_size
        self.latent_widths = latent_widths
        self.latents = torch.empty(
            (blocks + padding_blocks) * block_size, sum(latent_widths), dtype=dtype, device=device
        )
        self.scale = empty_scales(self.latents, len(latent_widths))
        self.tiered = tiered_tensors((self.latents, self.scale), blocks, block_size)

    def append(self, latents: Tensor, slot: Tensor) -> None:
        """Write new tokens. latents: [T, kv_lora_rank + rope_dim]; slot: [T]"""
        if self.scale is not None:
            parts, scales = zip(
                *(quantize_vectors(part, self.latents.dtype) for part in latents.split(self.latent_widths, -1)),
                strict=True,
            )
            self.scale.index_copy_(0, slot, torch.stack(scales, -1))
            latents = torch.cat([as_bits(part) for part in parts], -1)
        as_bits(self.latents).index_copy_(0, slot, as_bits(latents))

    def copy_blocks(self, run: CopyRun) -> None:
        for tensor in self.tiered:
            tensor.copy(run)


class RecurrentCache:
    """conv: [slots, kernel - 1, channels], the last inputs of the convolution; matrix: [slots,
    *config.state_shape] float32, the state of a delta net.
    """

    def __init__(self, slots: int, config: RecurrentConfig, dtype: torch.dtype, device: torch.device):
        self.conv = torch.empty(slots, config.kernel_size - 1, config.channels, dtype=dtype, device=device)
        self.matrix = torch.empty(slots if config.state_shape else 0, *config.state_shape, device=device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors with a row per state slot."""
        return self.conv, self.matrix

    def copy_state(self, source: int, target: int) -> None:
        for states in self.tensors:
            if len(states):
                states[target] = 0 if source == ZERO_SOURCE else states[source]


PagedCache = KVCache | LatentCache
LayerCache = PagedCache | RecurrentCache


def make_caches(
    mixers: Iterable[Mixer],
    blocks: int,
    block_size: int,
    state_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KVDtype | None = None,
    padding: int = 0,
) -> list[LayerCache]:
    """Return each layer's cache; a layer that reads another's keys and values gets that layer's cache.

    state_slots: number of recurrent states; kv_dtype: dtype of keys, values and latents, None for `dtype`, which
    recurrent states always have; padding: additional blocks and state slots that nothing reads. Latents are not
    stored in 4 bits.
    """
    paged_dtype = kv_dtype or dtype
    caches: list[LayerCache] = []
    for c in mixers:
        if isinstance(c, RecurrentConfig):
            caches.append(RecurrentCache(state_slots + padding, c, dtype, device))
        elif isinstance(c, LatentConfig):
            assert isinstance(paged_dtype, torch.dtype) and paged_dtype != INT4
            caches.append(
                LatentCache(blocks, block_size, (c.kv_lora_rank, c.rope_dim), paged_dtype, device, padding)
            )
        elif c.kv_source is None:
            caches.append(KVCache(blocks, block_size, c.kv_heads, c.head_dim, paged_dtype, device, padding))
        else:
            caches.append(caches[c.kv_source])
    return caches


def stored_width(dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of `dtype` store `dim` dimensions."""
    return dim // 2 if dtype == INT4 else dim


def empty_scales(stored: Tensor, vectors: int) -> Tensor | None:
    """Return scales for `vectors` vectors of each slot, in 4 bits with offsets; None if they are not quantized."""
    if stored.dtype not in DTYPE_MAX:
        return None
    shape = (len(stored), vectors, 2) if stored.dtype == INT4 else (len(stored), vectors)
    return stored.new_empty(shape, dtype=SCALE_DTYPE)


def as_bits(stored: Tensor) -> Tensor:
    """Return a view that torch can gather and scatter: on a CPU, 8-bit floats only work as integers."""
    return stored.view(torch.int8) if stored.dtype in DTYPE_MAX else stored


class TieredTensor:
    """A cache tensor in two tiers: slots on the device, evicted blocks in pinned host memory.

    Copies are enqueued on the device, which executes them in order with its other work: a block may be overwritten
    by the step after its copy, and the host never reads the host tier.

    on_device: [slots, ...] on the device, with the slots of `device_blocks` blocks first. Higher block ids are in
    the host tier.
    """

    def __init__(self, on_device: Tensor, device_blocks: int, block_size: int):
        self.on_device = on_device
        self.block_size = block_size
        self.device_blocks = device_blocks
        self.host_chunks: dict[int, Tensor] = {}

    def read(self, blocks: ListLike[int]) -> Tensor:
        """Return the contents of blocks, [len(blocks) * block_size, ...], on the host. From a device they arrive
        when it has executed its work so far."""
        shape = (len(blocks) * self.block_size, *self.on_device.shape[1:])
        content = torch.empty(shape, dtype=self.on_device.dtype, pin_memory=self.on_device.is_cuda)
        for index, block, count in adjacent_runs(blocks):
            self.copy_slots(block, content[index * self.block_size :], count)
        return content

    def write(self, blocks: ListLike[int], content: Tensor) -> None:
        """Fill blocks on the device. content: as `read` returns it"""
        for index, block, count in adjacent_runs(blocks):
            begin, slot, slots = index * self.block_size, block * self.block_size, count * self.block_size
            copy_rows(self.on_device[slot : slot + slots], content[begin : begin + slots])

    def copy_slots(self, block: int, target: Tensor, count: int) -> None:
        """Copy `count` blocks with adjacent ids to the beginning of `target`."""
        while count:
            slots = self.slots_from(block)
            slot_count = min(count * self.block_size, len(slots))
            copy_rows(target[:slot_count], slots[:slot_count])
            target, blocks = target[slot_count:], slot_count // self.block_size
            block, count = block + blocks, count - blocks

    def copy(self, run: CopyRun) -> None:
        """Copy blocks within a tier or between the two."""
        source, target, count = run
        while count:
            from_slots, to_slots = self.slots_from(source), self.slots_from(target)
            slot_count = min(count * self.block_size, len(from_slots), len(to_slots))
            to_slots[:slot_count].copy_(from_slots[:slot_count], non_blocking=True)
            blocks = slot_count // self.block_size
            source, target, count = source + blocks, target + blocks, count - blocks

    def slots_from(self, block: int) -> Tensor:
        """Return the block's slots and those of the following blocks that are contiguous with it."""
        if block < self.device_blocks:
            return self.on_device[block * self.block_size :]
        chunk, offset = divmod(block - self.device_blocks, HOST_CHUNK_BLOCKS)
        if chunk not in self.host_chunks:
            shape = (HOST_CHUNK_BLOCKS * self.block_size, *self.on_device.shape[1:])
            self.host_chunks[chunk] = torch.empty(
                shape, dtype=self.on_device.dtype, pin_memory=self.on_device.is_cuda
            )
        return self.host_chunks[chunk][offset * self.block_size :]


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copy contiguous rows. Within main memory on this thread alone, since torch would share half a megabyte among
    threads that wait for each other: with a load of 11 on two cores, that took ten times the processor time.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(target.reshape(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())
    else:
        target.copy_(source, non_blocking=target.device.type == "cpu")


def adjacent_runs(blocks: ListLike[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, block, count) of the longest runs of adjacent block ids."""
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield begin, blocks[begin], index - begin
            begin = index


def tiered_tensors(tensors: Iterable[Tensor | None], blocks: int, block_size: int) -> list[TieredTensor]:
    return [TieredTensor(tensor, blocks, block_size) for tensor in tensors if tensor is not None]

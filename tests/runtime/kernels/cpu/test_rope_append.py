"""Rotary positions and appending to the cache in one kernel: the bits of the reference, and no other slot is
written."""

from dataclasses import replace

import pytest
import torch

from localllm.arch.config import AttentionConfig, RopeConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu.rope_append import rope_append, unsupported
from localllm.runtime.kernels.rope_append import rope_append_reference
from localllm.runtime.kv_cache.tensors import KVCache, as_bits
from tests.tiny import CPU

ROTATED = AttentionConfig(heads=6, kv_heads=2, head_dim=64, rope=RopeConfig(10000.0, 64), scale=1.0)


def batch_of(slots: torch.Tensor) -> Batch:
    count = len(slots)
    start = torch.arange(count + 1, dtype=torch.int32)
    table = torch.zeros(count, 3, dtype=torch.int32)
    positions = torch.arange(count) * 13
    return Batch(positions, positions, start, start[1:], table, slots, torch.zeros(0, dtype=torch.int64), 16, 1, 1)


def cache_of(dtype: torch.dtype) -> KVCache:
    cache = KVCache(2, 16, ROTATED.kv_heads, ROTATED.head_dim, dtype, CPU)
    for stored in (cache.k, cache.v):
        as_bits(stored).view(torch.uint8).fill_(0x7F)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotated", [64, 32])
@pytest.mark.parametrize("tokens", [1, 7])
def test_bits_are_those_of_the_reference(tokens: int, rotated: int, dtype: torch.dtype) -> None:
    config = replace(ROTATED, rope=RopeConfig(10000.0, rotated))
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 10 * 64, generator=generator).to(dtype)
    batch = batch_of(torch.randperm(32, generator=generator)[:tokens])
    angle = batch.positions[:, None, None] * 0.7 ** torch.arange(rotated // 2)
    angles, caches = (angle.cos(), angle.sin()), [cache_of(dtype), cache_of(dtype)]
    assert unsupported(qkv, caches[0], config, angles) is None
    q = rope_append(qkv, caches[0], batch.slot_mapping, config, angles)
    expected, _ = rope_append_reference(qkv, caches[1], batch, config, angles, None, None, 1e-6)
    assert torch.equal(q, expected)
    for written, reference in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        assert torch.equal(written.view(torch.uint8), reference.view(torch.uint8))


@pytest.mark.parametrize(
    "config",
    [
        replace(ROTATED, rope=None),
        replace(ROTATED, rope=RopeConfig(10000.0, 64, interleaved=True)),
        replace(ROTATED, rope=RopeConfig(10000.0, 24)),
        replace(ROTATED, qk_norm="per_head"),
        replace(ROTATED, kv_source=0),
    ],
    ids=["no positions", "interleaved", "partial vectors", "norms", "another's keys"],
)
def test_other_layers_are_left_to_the_reference(config: AttentionConfig) -> None:
    width = config.rope.dim if config.rope else 64
    angles = (torch.zeros(1, 1, width // 2), torch.zeros(1, 1, width // 2))
    assert unsupported(torch.zeros(1, 640), cache_of(torch.float32), config, angles)


def test_an_8_bit_cache_is_left_to_the_reference() -> None:
    angles = (torch.zeros(1, 1, 32), torch.zeros(1, 1, 32))
    assert unsupported(torch.zeros(1, 640), cache_of(torch.int8), ROTATED, angles)


def test_many_tokens_are_left_to_the_reference() -> None:
    angles = (torch.zeros(65, 1, 32), torch.zeros(65, 1, 32))
    assert unsupported(torch.zeros(64, 640), cache_of(torch.float32), ROTATED, angles) is None
    assert unsupported(torch.zeros(65, 640), cache_of(torch.float32), ROTATED, angles)

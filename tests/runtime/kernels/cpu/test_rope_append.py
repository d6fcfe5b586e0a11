"""Rotary positions and appending to the cache in one kernel: the bits of the reference, and no other slot is
written."""

from dataclasses import replace

import pytest
import torch

from localllm.arch.config import AttentionConfig, RopeConfig
from localllm.quant.vectors import INT4, KVDtype
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


def cache_of(dtype: KVDtype, head_dim: int = 64) -> KVCache:
    cache = KVCache(2, 16, ROTATED.kv_heads, head_dim, dtype, CPU)
    for stored in parts(cache):
        stored.fill_(0x7F)
    return cache


def parts(cache: KVCache) -> list[torch.Tensor]:
    stored = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [as_bits(each).view(torch.uint8) for each in stored if each is not None]


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
    for written, reference in zip(*map(parts, caches), strict=True):
        assert torch.equal(written, reference)


@pytest.mark.parametrize("form", [torch.int8, (torch.int8, INT4), INT4], ids=["int8", "k8v4", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (64, 32), (80, 32), (96, 96), (256, 64)])
def test_bits_of_a_quantized_cache_are_those_of_the_reference(
    head_dim: int, rotated: int, dtype: torch.dtype, form: KVDtype
) -> None:
    """With zeros, heads far from zero, and a NaN and an infinity, whose scales are not finite."""
    config = replace(ROTATED, head_dim=head_dim, rope=RopeConfig(10000.0, rotated))
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(7, 10, head_dim, generator=generator)
    qkv[1], qkv[2], qkv[3], qkv[4, :, ::3] = 0.0, qkv[2] + 9, qkv[3] * 1000, 0.0
    qkv[5, 6, 1], qkv[5, 9, 3], qkv[6, 7, 2] = torch.nan, torch.inf, -torch.inf
    qkv = qkv.flatten(1).to(dtype)
    batch = batch_of(torch.randperm(32, generator=generator)[:7])
    angle = batch.positions[:, None, None] * 0.7 ** torch.arange(rotated // 2)
    angles, caches = (angle.cos(), angle.sin()), [cache_of(form, head_dim) for _ in range(2)]
    assert unsupported(qkv, caches[0], config, angles) is None
    q = rope_append(qkv, caches[0], batch.slot_mapping, config, angles)
    expected, _ = rope_append_reference(qkv, caches[1], batch, config, angles, None, None, 1e-6)
    assert torch.equal(q, expected)
    finite = torch.ones(32, dtype=torch.bool)
    finite[batch.slot_mapping[5:]] = False
    for written, reference in zip(*map(parts, caches), strict=True):
        assert torch.equal(written[finite], reference[finite])
    for scale, slot, head in (("k_scale", 5, 0), ("v_scale", 5, 1), ("k_scale", 6, 1)):
        for cache in caches:
            assert not getattr(cache, scale)[batch.slot_mapping[slot], head].isfinite().all()


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


@pytest.mark.parametrize(
    ("form", "head_dim"), [(torch.float8_e4m3fn, 64), (INT4, 8 * 5)], ids=["fp8", "heads of 40"]
)
def test_other_caches_are_left_to_the_reference(form: KVDtype, head_dim: int) -> None:
    angles = (torch.zeros(1, 1, head_dim // 2), torch.zeros(1, 1, head_dim // 2))
    config = replace(ROTATED, head_dim=head_dim)
    assert unsupported(torch.zeros(1, 10 * head_dim), cache_of(form, head_dim), config, angles)


def test_many_tokens_are_left_to_the_reference() -> None:
    angles = (torch.zeros(65, 1, 32), torch.zeros(65, 1, 32))
    assert unsupported(torch.zeros(64, 640), cache_of(torch.float32), ROTATED, angles) is None
    assert unsupported(torch.zeros(65, 640), cache_of(torch.float32), ROTATED, angles)

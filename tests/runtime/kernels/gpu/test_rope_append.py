"""The fused operations between the q, k, v product and attention, under Triton's interpreter against plain torch:
the cache is equal except where the last bit of a sum decides, and nothing else is written."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, QueryScaling, RopeConfig
from localllm.quant.vectors import DTYPE_MAX, EIGHT_BIT_DTYPES, INT4, KV_DTYPES, KVDtype, dequantize_vectors
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu.rope_append import rope_append, rope_append_unsupported
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.rope_append import rope_append_reference
from localllm.runtime.kv_cache.tensors import KVCache, as_bits
from tests.tiny import CPU

pytestmark = pytest.mark.usefixtures("interpreter")
PLAIN = AttentionConfig(heads=5, kv_heads=2, head_dim=12, rope=None, scale=1.0)
TURNED = replace(PLAIN, rope=RopeConfig(10000.0, 12))
VARIANTS = {
    "no positions": PLAIN,
    "half-split": TURNED,
    "interleaved": replace(PLAIN, rope=RopeConfig(10000.0, 12, interleaved=True)),
    "partial": replace(PLAIN, rope=RopeConfig(10000.0, 8)),
    "partial, interleaved": replace(PLAIN, rope=RopeConfig(10000.0, 4, interleaved=True)),
    "normed": replace(TURNED, qk_norm="per_head"),
    "normed across heads": replace(TURNED, qk_norm="whole"),
    "normed, no positions": replace(PLAIN, qk_norm="per_head"),
    "normed, gated, partial": replace(PLAIN, rope=RopeConfig(1e4, 4), qk_norm="per_head", output_gate=True),
    "values normed": replace(TURNED, qk_norm="per_head", value_norm=True),
    "keys as values": replace(TURNED, qk_norm="per_head", value_norm=True, keys_as_values=True),
    "another's keys": replace(TURNED, qk_norm="per_head", kv_source=0),
    "growing": replace(PLAIN, query_growth=QueryScaling(0.5, 16)),
    "wide": AttentionConfig(heads=2, kv_heads=1, head_dim=128, rope=RopeConfig(1e4, 128), scale=1.0),
}
POSITIONS = [0, 15, 16, 70, 1]
SLOTS = [7, 30, -1, 0, 16]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def batch_of(slots: list[int]) -> Batch:
    table, none = torch.zeros(5, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    start, positions = torch.arange(6, dtype=torch.int32), torch.tensor(POSITIONS)
    return Batch(positions, positions, start, start[1:], table, torch.tensor(slots), none, 16, 1, 1)


def cache_of(c: AttentionConfig, form: KVDtype) -> KVCache:
    cache = KVCache(2, 16, c.kv_heads, c.head_dim, form, CPU)
    for rows in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if rows is not None:
            as_bits(rows).view(torch.uint8).fill_(0x7F)
    return cache


def arguments(c: AttentionConfig, dtype: torch.dtype, kind: str = "rms") -> tuple:
    own = c.kv_heads if c.kv_source is None else 0
    rows = (c.heads * (2 if c.output_gate else 1) + (1 if c.keys_as_values else 2) * own) * c.head_dim
    held = torch.full((5, rows + 8), torch.nan, dtype=dtype)
    held[:, 3:-5] = numbers(5, rows).to(dtype)
    angles = None
    if c.rope:
        angle = torch.tensor(POSITIONS)[:, None, None] * 0.7 ** torch.arange(c.rope.dim // 2)
        angles = (1.1 * angle.cos(), 1.1 * angle.sin())
    norms = (None, None)
    if c.qk_norm:
        sizes = [heads * c.head_dim if c.qk_norm == "whole" else c.head_dim for heads in (c.heads, own)]
        norms = tuple(Norm(1 + numbers(size, seed=9) / 4, 1e-6, kind) if size else None for size in sizes)
    return held[:, 3:-5], angles, norms


def both(c: AttentionConfig, dtype: torch.dtype, form: KVDtype, kind: str = "rms") -> tuple:
    """Return (q, gate, cache) of the kernel and of plain torch."""
    qkv, angles, norms = arguments(c, dtype, kind)
    caches = [cache_of(c, form) for _ in range(2)]
    assert rope_append_unsupported(qkv, caches[0], batch_of(SLOTS), c, angles, *norms, 1e-5) is None
    q, gate = rope_append(qkv, caches[0], batch_of(SLOTS), c, angles, *norms, 1e-5)
    # Plain torch knows no token without a slot: it writes that one to a slot of its own, which is put back.
    spare = [slot if slot >= 0 else 31 for slot in SLOTS]
    expected = rope_append_reference(qkv, caches[1], batch_of(spare), c, angles, *norms, 1e-5)
    fresh = cache_of(c, form)
    for name in ("k", "v", "k_scale", "v_scale"):
        if (rows := getattr(caches[1], name)) is not None:
            as_bits(rows)[31] = as_bits(getattr(fresh, name))[31]
    return (q, gate, caches[0]), (*expected, caches[1])


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_heads(name: str, dtype: torch.dtype) -> None:
    (q, gate, cache), (expected_q, expected_gate, expected) = both(VARIANTS[name], dtype, dtype)
    close = {"atol": 1e-6, "rtol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(q, expected_q, **close)
    torch.testing.assert_close(gate, expected_gate, **close)
    torch.testing.assert_close(cache.k, expected.k, **close, equal_nan=True)
    torch.testing.assert_close(cache.v, expected.v, **close, equal_nan=True)


def test_means_are_subtracted() -> None:
    (q, _, cache), (expected_q, _, expected) = both(VARIANTS["normed"], torch.float32, torch.float32, "layer")
    torch.testing.assert_close(q, expected_q, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cache.k, expected.k, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [12, 16])
def test_bits_are_those_of_plain_torch(form: str, dtype: torch.dtype, head_dim: int) -> None:
    """With values in INT4, keys and queries are rotated in parts of 4 and of 16 dimensions."""
    (q, _, cache), (expected_q, _, expected) = both(replace(PLAIN, head_dim=head_dim), dtype, KV_DTYPES[form])
    assert torch.equal(q, expected_q)
    for name in ("k", "v", "k_scale", "v_scale"):
        got, wanted = as_bits(getattr(cache, name)), as_bits(getattr(expected, name))
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), name


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("form", KV_DTYPES)
@pytest.mark.parametrize("name", ["normed", "keys as values", "partial, interleaved", "growing", "wide"])
def test_bits_of_turned_heads(name: str, form: str) -> None:
    (q, _, cache), (expected_q, _, expected) = both(VARIANTS[name], torch.bfloat16, KV_DTYPES[form])
    torch.testing.assert_close(q, expected_q)
    there = [slot for slot in SLOTS if slot >= 0]
    for side in ("k", "v"):
        got, wanted = (
            dequantize_vectors(getattr(each, side)[there], getattr(each, side + "_scale")[there], torch.float32)
            for each in (cache, expected)
        )
        most = {torch.int8: 127, torch.float8_e4m3fn: 14, INT4: 3.5}[getattr(cache, side).dtype]
        step = wanted.abs().amax(-1, keepdim=True) / most
        assert ((got - wanted).abs() <= 1.02 * step).all()
        assert ((got - wanted).abs() > 1e-3 * step).sum() <= 3  # a last bit that fell the other way


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # NaN, whose scale is NaN too
@pytest.mark.parametrize("form", [*EIGHT_BIT_DTYPES, "int4"])
def test_every_number_and_all_between(form: str) -> None:
    c = AttentionConfig(heads=1, kv_heads=1, head_dim=1024, rope=None, scale=1.0)
    dtype = EIGHT_BIT_DTYPES.get(form, INT4)
    most, places = DTYPE_MAX[dtype], [0, 1, 2, 3, 4]
    x = torch.linspace(-most, most, 1024).repeat(5, 3)
    x[1] = torch.logspace(-40, 2.2, 1024).repeat(3) * torch.tensor([1.0, -1.0]).repeat(1536)
    x[2], x[3, 1030], x[3, 2060], x[4, 1500] = 0.0, torch.nan, torch.inf, -torch.inf
    got, expected = cache_of(c, dtype), cache_of(c, dtype)
    rope_append(x, got, batch_of(places), c, None, None, None, 1e-5)
    rope_append_reference(x, expected, batch_of(places), c, None, None, None, 1e-5)
    for side in ("k", "v"):
        rows, scales = getattr(got, side), getattr(got, side + "_scale")
        assert torch.equal(as_bits(rows)[:3], as_bits(getattr(expected, side))[:3])
        assert torch.equal(scales[:3], getattr(expected, side + "_scale")[:3])
    for cache in (got, expected):
        assert not dequantize_vectors(cache.k, cache.k_scale, torch.float32)[3:5].isfinite().all(-1).any()
    assert not got.v_scale[3].isfinite().any()


def test_a_token_has_the_same_bits_alone() -> None:
    c = VARIANTS["normed"]
    qkv, (cos, sin), norms = arguments(c, torch.bfloat16)
    together = rope_append(qkv, cache_of(c, torch.bfloat16), batch_of(SLOTS), c, (cos, sin), *norms, 1e-5)[0]
    batch = batch_of(SLOTS)
    alone = replace(batch, slot_mapping=batch.slot_mapping[3:4], positions=batch.positions[3:4])
    angles = (cos[3:4].contiguous(), sin[3:4].contiguous())
    q = rope_append(qkv[3:4], cache_of(c, torch.bfloat16), alone, c, angles, *norms, 1e-5)[0]
    assert torch.equal(q[0], together[3])


def test_reasons() -> None:
    qkv, angles, norms = arguments(VARIANTS["normed"], torch.bfloat16)
    batch, c = batch_of(SLOTS), VARIANTS["normed"]
    cache = cache_of(c, torch.float32)
    assert rope_append_unsupported(qkv, cache, batch, c, angles, *norms, 1e-5)
    cache = cache_of(c, torch.bfloat16)
    whole = replace(c, qk_norm="whole")
    assert rope_append_unsupported(qkv, cache, batch, replace(whole, output_gate=True), angles, *norms, 1e-5)
    layered = replace(norms[0], norm_type="layer")
    assert rope_append_unsupported(qkv, cache, batch, whole, angles, layered, layered, 1e-5)
    assert rope_append_unsupported(qkv, cache, batch, replace(c, head_dim=2048), angles, *norms, 1e-5)

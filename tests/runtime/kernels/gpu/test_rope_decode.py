"""Rope, append and attention in one kernel: the bits of the separate kernels, without a read of the new slot."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, QueryScaling, RopeConfig
from localllm.quant.vectors import INT4, KV_DTYPES, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.attention import append_and_attend_reference
from localllm.runtime.kernels.gpu.launch import AMD_GPUS, GPUS, record_launches
from localllm.runtime.kernels.gpu.rope_decode import (
    MAX_SEQUENCES,
    MOST_REGISTERS,
    rope_decode,
    rope_decode_kernel,
    rope_decode_unsupported,
)
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kernels.registry import explain, prefer_reference
from localllm.runtime.kv_cache.tensors import KVCache, as_bits
from tests.runtime.kernels.gpu.test_attention import BF16, FP32, filled, slots, step
from tests.runtime.kernels.harness import check_on_gpu

pytestmark = pytest.mark.usefixtures("interpreter")
PLAIN = AttentionConfig(4, 2, 16, RopeConfig(10000.0, 16), 0.3)
NORMED = replace(PLAIN, qk_norm="per_head")
CONTEXTS = (1, 65, 130)  # tokens, with the new one: a first one, a first one of a tile, and one within
VARIANTS = {
    "half-split": PLAIN,
    "no positions": replace(PLAIN, rope=None),
    "interleaved": replace(PLAIN, rope=RopeConfig(10000.0, 16, interleaved=True)),
    "partial, 10 dimensions": replace(PLAIN, head_dim=10, rope=RopeConfig(10000.0, 4)),
    "window and sinks": replace(PLAIN, window=7, sinks=True),
    "wide window, softcap": replace(PLAIN, window=70, softcap=1.5),
    "normed": NORMED,
    "normed, gated, partial": replace(NORMED, output_gate=True, rope=RopeConfig(10000.0, 4)),
    "values normed": replace(NORMED, value_norm=True),
    "keys as values": replace(NORMED, value_norm=True, keys_as_values=True),
    "another's keys": replace(NORMED, kv_source=0),
    "growing": replace(PLAIN, query_growth=QueryScaling(0.5, 16)),
    "40 heads of a key": replace(NORMED, heads=40, kv_heads=1),
    "128 dimensions": replace(NORMED, head_dim=128, rope=RopeConfig(10000.0, 128)),
    "256 dimensions": replace(NORMED, head_dim=256, rope=RopeConfig(10000.0, 256), heads=2, kv_heads=1),
}


def arguments(
    c: AttentionConfig, form: KVDtype, dtype: torch.dtype, contexts: tuple[int, ...] = CONTEXTS
) -> tuple:
    """Return a call of `append_and_attend`; NaN is where the new tokens will be."""
    spans, generator = [(context, 1) for context in contexts], torch.Generator().manual_seed(3)
    batch, own = step(spans), c.kv_heads if c.kv_source is None else 0
    cache = filled(batch, c, form, spans, dtype if form == dtype else BF16)
    for i, context in enumerate(contexts if own else ()):
        for rows in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if rows is not None:
                as_bits(rows)[slots(batch, i, context - 1, context)] = torch.full(
                    (), torch.nan if as_bits(rows).is_floating_point() else 0x7F, dtype=as_bits(rows).dtype
                )

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    columns = (c.heads * (2 if c.output_gate else 1) + (1 if c.keys_as_values else 2) * own) * c.head_dim
    qkv = numbers(len(contexts), columns + 16).to(dtype)[:, :columns]
    angle = (torch.tensor(contexts)[:, None, None] - 1) * 0.7 ** torch.arange(c.rope.dim // 2 if c.rope else 0)
    angles = (1.1 * angle.cos(), 1.1 * angle.sin()) if c.rope else None
    weights = [(1 + numbers(c.head_dim) / 4).to(torch.promote_types(dtype, FP32)) for _ in range(2)]
    norms = [
        Norm(weight, 1e-6) if c.qk_norm and count else None
        for weight, count in zip(weights, (c.heads, own), strict=True)
    ]
    return qkv, cache, batch, c, angles, *norms, 1e-5, numbers(c.heads).to(dtype) if c.sinks else None


def assert_same(got: KVCache, expected: KVCache) -> None:
    for name in ("k", "v", "k_scale", "v_scale"):
        if (rows := getattr(got, name)) is not None:
            both = (as_bits(each).contiguous().view(torch.uint8) for each in (rows, getattr(expected, name)))
            assert torch.equal(*both), name


def assert_bits_of_separate_kernels(c: AttentionConfig, form: KVDtype, dtype: torch.dtype) -> None:
    together, apart = arguments(c, form, dtype), arguments(c, form, dtype)
    assert rope_decode_unsupported(*together) is None
    out = rope_decode(*together)
    assert torch.equal(out, append_and_attend_reference(*apart))
    assert out.isfinite().all()
    assert_same(together[1], apart[1])


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_are_those_of_separate_kernels(name: str) -> None:
    """Which are compared with torch by tests of their own."""
    assert_bits_of_separate_kernels(VARIANTS[name], BF16, BF16)


@pytest.mark.quick_every(8)
@pytest.mark.parametrize("name", ["normed", "wide window, softcap", "another's keys", "128 dimensions"])
@pytest.mark.parametrize("form", KV_DTYPES)
def test_bits_over_a_quantized_cache(form: str, name: str) -> None:
    assert_bits_of_separate_kernels(VARIANTS[name], KV_DTYPES[form], BF16)


def test_bits_in_float32() -> None:
    assert_bits_of_separate_kernels(VARIANTS["values normed"], FP32, FP32)


@pytest.mark.parametrize(
    ("form", "dtype"), [(None, FP32), (None, BF16), (torch.int8, BF16), (INT4, BF16)], ids=str
)
def test_results_are_those_of_torch(form: KVDtype | None, dtype: torch.dtype) -> None:
    with prefer_reference("rope_append"), prefer_reference("attention"):
        ran = check_on_gpu("append_and_attend", lambda each: arguments(NORMED, form or each, each), dtype)
    assert ran == ["triton-rope-decode"]


def test_a_row_of_a_bucket_without_a_sequence_changes_nothing() -> None:
    both, alone = arguments(NORMED, BF16, BF16, (20, 9)), arguments(NORMED, BF16, BF16, (20, 9))
    expected = rope_decode(*alone)
    emptied = replace(both[2], context_len=torch.tensor([20, 0], dtype=torch.int32))
    out = rope_decode(both[0], both[1], emptied, *both[3:])
    assert torch.equal(out[0], expected[0])
    assert not out[1].any()


def test_what_the_kernel_declines() -> None:
    def reason(c: AttentionConfig, batch: Batch | None = None) -> str:
        qkv, cache, own, *rest = arguments(c, BF16, BF16, (9,))
        return dict(explain("append_and_attend", qkv, cache, batch or own, *rest))["triton-rope-decode"]

    assert reason(PLAIN) == "ok"
    assert reason(PLAIN, step([(9, 2)])) == "a sequence has more than one new token"
    many = step([(1, 1)] * (MAX_SEQUENCES + 1))
    assert reason(PLAIN, many) == f"there are more than {MAX_SEQUENCES} sequences"
    assert reason(replace(PLAIN, qk_norm="whole")) == "heads are normalized together"
    assert reason(replace(PLAIN, head_dim=512)) == "heads have more than 512 bytes"
    with record_launches(AMD_GPUS["gfx1100"]):
        assert reason(PLAIN) == "RDNA has too few registers"
    with record_launches(AMD_GPUS["gfx942"]):
        assert reason(PLAIN) == "ok"


@pytest.mark.parametrize(("form", "most"), [("int8", MOST_REGISTERS), ("k8v4", None), ("int4", None)])
def test_8_bit_caches_may_use_more_registers(form: str, most: int | None) -> None:
    """Of NVIDIA's GPUs: the option is unknown to AMD's compiler."""
    for gpu, expected in ((GPUS[90], most), (AMD_GPUS["gfx942"], None)):
        with record_launches(gpu) as launches:
            rope_decode(*arguments(PLAIN, KV_DTYPES[form], BF16, (9,)))
        options = next(each.options for each in launches if each.kernel is rope_decode_kernel)
        assert options.get("maxnreg") == expected

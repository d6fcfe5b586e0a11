import random

import pytest
import torch

from localllm.arch.config import AttentionConfig
from localllm.quant.vectors import EIGHT_BIT_DTYPES, INT4, KV_DTYPES, KVDtype
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.attention import attention
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache
from tests.runtime.kernels.harness import COMPILED, check
from tests.tiny import CPU

BLOCKS, SIZE = 40, 8


def step(spans: list[tuple[int, int]], scattered: bool) -> Batch:
    """Batch with one sequence per span (context length, new tokens), on adjacent or scattered blocks."""
    pool = BlockPool(BLOCKS, SIZE)
    if scattered:
        pool.allocate = lambda after=None: free.pop()  # pyright: ignore[reportAttributeAccessIssue]
        free = random.Random(0).sample(range(BLOCKS), BLOCKS)
    states = [SequenceState(pool) for _ in spans]
    for state, (context, _) in zip(states, spans, strict=True):
        state.extend(context)
    return Batch.from_states(states, [[0] * count for _, count in spans], [], CPU)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (1.5, False), (None, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 10), (4, 4, 16), (8, 1, 64)])
@pytest.mark.parametrize(
    "spans", [[(1, 1)], [(33, 1)], [(40, 40)], [(40, 12)], [(17, 1), (9, 9), (64, 5), (3, 2)]], ids=str
)
def test_attention(
    spans: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scattered: bool,
    window: int | None,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    check_kernels(spans, heads, kv_heads, head_dim, scattered, window, dtype, softcap, with_sinks, None)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", KV_DTYPES.values())
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (1.5, False), (None, True)])
@pytest.mark.parametrize("spans", [[(33, 1)], [(40, 12)], [(17, 1), (9, 9), (64, 5), (1, 1)]], ids=str)
def test_attention_over_a_quantized_cache(
    spans: list[tuple[int, int]],
    scattered: bool,
    window: int | None,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
    form: KVDtype,
) -> None:
    check_kernels(spans, 6, 2, 10, scattered, window, dtype, softcap, with_sinks, form)


def check_kernels(
    spans: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scattered: bool,
    window: int | None,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
    form: KVDtype | None,
) -> None:
    config = AttentionConfig(heads, kv_heads, head_dim, None, 0.3, window, softcap, sinks=with_sinks)
    batch = step(spans, scattered)
    generator = torch.Generator().manual_seed(0)

    def random_rows(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).bfloat16()

    q = random_rows(sum(count for _, count in spans), heads)
    keys, values = random_rows(BLOCKS * SIZE, kv_heads), random_rows(BLOCKS * SIZE, kv_heads)
    written = torch.zeros(BLOCKS * SIZE, dtype=torch.bool)
    for table, (context, _) in zip(batch.block_table.tolist(), spans, strict=True):
        for position in range(context):
            written[table[position // SIZE] * SIZE + position % SIZE] = True
    keys[~written] = torch.nan  # reading what was never written shows
    values[~written] = torch.nan

    sinks = torch.linspace(-2, 2, heads).bfloat16()

    def make(d: torch.dtype) -> tuple[torch.Tensor, KVCache, Batch, AttentionConfig, torch.Tensor | None]:
        cache = KVCache(BLOCKS, SIZE, kv_heads, head_dim, form or d, CPU)
        cache.append(keys.to(d), values.to(d), torch.arange(BLOCKS * SIZE))
        return q.to(d), cache, batch, config, sinks.to(d) if with_sinks else None

    tiles = form in EIGHT_BIT_DTYPES.values() and any(count == 1 for _, count in spans)
    plain = not softcap and not with_sinks
    few = any(count <= 16 for _, count in spans)
    expected = (
        ["cpu-tokens"] * (few and COMPILED) + ["8-bit-tiles"] * tiles + ["torch-sdpa"] * plain + ["torch-matmul"]
    )
    assert check("attention", make, dtype) == expected


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: KVDtype, config: AttentionConfig, batch: Batch
) -> torch.Tensor:
    slots = len(k)
    cache = KVCache(slots // SIZE, SIZE, config.kv_heads, config.head_dim, form, CPU)
    cache.append(k, v, torch.arange(slots))
    return attention(cache.rotate(q), cache, batch, config)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("form", EIGHT_BIT_DTYPES.values())
def test_eight_bit_errors_are_within_half_a_step(form: torch.dtype, count: int, seed: int) -> None:
    """A score is off by at most e = scale * sum |q| * (half a step of k); then no weight changes by more than a
    factor of exp(2 e), and the mixture by (exp(2 e) - 1) * max |v| and half a step of v."""
    context, (heads, kv_heads, head_dim) = BLOCKS * SIZE, (4, 2, 32)
    config = AttentionConfig(heads, kv_heads, head_dim, None, 0.2)
    batch = step([(context, count)], scattered=False)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(count, heads, head_dim, generator=generator)
    k, v = (torch.randn(context, kv_heads, head_dim, generator=generator) for _ in range(2))
    v *= torch.linspace(0.1, 10, context)[:, None, None]
    exact = attended(q, k, v, torch.float32, config, batch)
    relative = 1 / 254 if form == torch.int8 else 2**-4  # half a step, of a vector's largest number
    largest = k.abs().amax(-1).max(0).values * relative  # [kv_heads]
    off = config.scale * q.abs().sum(-1) * largest.repeat_interleave(heads // kv_heads)
    v_largest = v.abs().amax((0, 2)).repeat_interleave(heads // kv_heads)
    bound = 1.01 * (torch.expm1(2 * off) + relative) * v_largest
    error = (attended(q, k, v, form, config, batch) - exact).abs().amax(-1)
    assert (error <= bound).all()
    assert error.max() < 0.1 * bound.max()


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64])
@pytest.mark.parametrize("count", [1, 9, 40])
@pytest.mark.parametrize("form", [(torch.int8, INT4), INT4], ids=["k8v4", "int4"])
def test_four_bit_errors_are_those_of_rounded_keys_and_values(form: KVDtype, count: int, head_dim: int) -> None:
    """The keys are larger in one dimension, and rotated; the values are far from zero."""
    context, (heads, kv_heads) = BLOCKS * SIZE, (4, 2)
    config = AttentionConfig(heads, kv_heads, head_dim, None, 0.2)
    batch = step([(context, count)], scattered=False)
    generator = torch.Generator().manual_seed(head_dim)
    q = torch.randn(count, heads, head_dim, generator=generator)
    k, v = (torch.randn(context, kv_heads, head_dim, generator=generator) for _ in range(2))
    q[..., 1], k[..., 1], v = q[..., 1] / 8, k[..., 1] * 8, v + 5
    exact, rounded = (attended(q, k, v, each, config, batch) for each in (torch.float32, form))
    four_bit_values = attended(q, k, v, (torch.float32, INT4), config, batch)
    assert (four_bit_values - exact).abs().max() < 0.1  # of numbers around 5 in steps of 0.3 to 0.5
    assert (rounded - exact).abs().max() < (0.12 if form != INT4 else 0.6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", KV_DTYPES.values())
def test_a_sequence_does_not_depend_on_the_batch(form: KVDtype, threads: int) -> None:
    """Includes several tiles, and any number of threads per head."""
    config = AttentionConfig(8, 4, 64, None, 0.125)
    rows, size = 2048, 16
    cache = KVCache(rows // size, size, 4, 64, form, CPU)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(rows, 4, 64, generator=generator) for _ in range(2))
    cache.append(k, v, torch.arange(rows))
    pool = BlockPool(rows // size, size)
    states = [SequenceState(pool) for _ in range(2)]
    for state, length in zip(states, (1500, 30), strict=True):
        state.extend(length)
    q = torch.randn(2, 8, 64, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        turned = cache.rotate(q)
        both = attention(turned, cache, Batch.from_states(states, [[0], [0]], [], CPU), config)
        alone = attention(turned[:1], cache, Batch.from_states(states[:1], [[0]], [], CPU), config)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(both[:1], alone)
    exact = attention(q, plain(k, v), Batch.from_states(states, [[0], [0]], [], CPU), config)
    most = {torch.int8: 0.01, torch.float8_e4m3fn: 0.05, (torch.int8, INT4): 0.1, INT4: 0.2}
    assert (both - exact).abs().max() < most[form]


def plain(k: torch.Tensor, v: torch.Tensor) -> KVCache:
    cache = KVCache(len(k) // 16, 16, k.shape[1], k.shape[2], k.dtype, CPU)
    cache.append(k, v, torch.arange(len(k)))
    return cache

import random

import pytest
import torch

from localllm.arch.config import AttentionConfig
from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache
from localllm.runtime.state import BlockPool, SequenceState
from tests.runtime.kernels.harness import check
from tests.tiny import CPU

BLOCKS, SIZE = 40, 8


def step(spans: list[tuple[int, int]], scattered: bool) -> Batch:
    """One sequence a span of (context, tokens that it brings), on neighbouring or scattered blocks."""
    pool = BlockPool(BLOCKS, SIZE)
    if scattered:
        pool.take = lambda after=None: free.pop()  # pyright: ignore[reportAttributeAccessIssue]
        free = random.Random(0).sample(range(BLOCKS), BLOCKS)
    states = [SequenceState(pool) for _ in spans]
    for state, (context, _) in zip(states, spans, strict=True):
        state.extend(context)
    return Batch.of(states, [[0] * count for _, count in spans], [], CPU)


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
        cache = KVCache(BLOCKS, SIZE, kv_heads, head_dim, d, CPU)
        cache.k, cache.v = keys.to(d), values.to(d)
        return q.to(d), cache, batch, config, sinks.to(d) if with_sinks else None

    plain = not softcap and not with_sinks
    assert check("attention", make, dtype) == ["torch-sdpa"] * plain + ["torch-matmul"]

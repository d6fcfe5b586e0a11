"""Latent attention for GPUs, under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from localllm.arch.config import LatentConfig, RopeConfig
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.gpu import splits
from localllm.runtime.kernels.latent import latent_attention
from localllm.runtime.kv_cache.tensors import LatentCache
from tests.runtime.kernels.gpu.test_attention import BLOCKS, SIZE, Spans, poisoned, slots, step
from tests.runtime.kernels.harness import check_on_gpu
from tests.tiny import CPU

__all__ = ["poisoned"]
pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")
BF16, FP32 = torch.bfloat16, torch.float32
RANK, ROPE, NOPE, VALUE = 24, 6, 10, 14
Call = tuple[torch.Tensor, LatentCache, Batch, LatentConfig, torch.Tensor, torch.Tensor]


def call(spans: Spans, heads: int, form: torch.dtype | None, dtype: torch.dtype) -> Call:
    c = LatentConfig(heads, None, RANK, NOPE, ROPE, VALUE, RopeConfig(100.0, ROPE), 0.3, 1e-6)
    batch = step(spans)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    q = random(sum(count for _, count in spans), heads, NOPE + ROPE)
    k_b, v_b = (random(heads, dim, RANK) / 4 for dim in (NOPE, VALUE))
    rows = random(BLOCKS * SIZE, RANK + ROPE)
    hidden = torch.ones(len(rows), dtype=torch.bool)
    for i, (context, _) in enumerate(spans):
        hidden[slots(batch, i, 0, context)] = False
    rows[hidden] = torch.nan  # reading what was never written shows
    cache = LatentCache(BLOCKS, SIZE, (RANK, ROPE), form or dtype, CPU)
    cache.append(rows, torch.arange(len(rows)))
    return q, cache, batch, c, k_b, v_b


@pytest.mark.parametrize(
    ("spans", "heads", "form", "dtype"),
    [
        ([(1, 1), (133, 1), (20, 3)], 3, None, FP32),
        ([(33, 1), (5, 1)], 20, None, BF16),
        ([(40, 3), (1, 1)], 3, torch.int8, BF16),
        ([(70, 2)], 1, torch.float8_e4m3fn, BF16),
    ],
    ids=str,
)
def test_few_tokens(spans: Spans, heads: int, form: torch.dtype | None, dtype: torch.dtype) -> None:
    assert check_on_gpu("latent_attention", lambda d: call(spans, heads, form, d), dtype)[0] == "triton-absorbed"


def test_a_token_has_the_same_bits_alone_and_as_a_draft() -> None:
    """Also where its neighbours' context is cut into longer chunks: of one tile up to 128 tokens, then of two."""
    q, cache, batch, c, k_b, v_b = call([(7, 1), (130, 4)], 2, None, BF16)
    together = latent_attention(q, cache, batch, c, k_b, v_b)
    for before in (1, 2):
        alone = replace(
            batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_len=batch.context_len[1:] - before,
            block_table=batch.block_table[1:],
            max_query_len=1,
            uniform_query_len=1,
        )
        row = 4 - before
        one = latent_attention(q[row : row + 1], cache, alone, c, k_b, v_b)
        assert torch.equal(together[row : row + 1], one)


def test_many_tokens_are_left_to_torch() -> None:
    ran = check_on_gpu("latent_attention", lambda d: call([(40, 17)], 2, None, d), FP32)
    assert ran == ["torch-two-forms"]


def test_sequences_that_take_turns_in_the_workspace_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call([(20, 12), (33, 5), (5, 1)], 3, None, BF16)
    together = latent_attention(*arguments)
    monkeypatch.setattr(splits, "MAX_WORKSPACE_BYTES", 1)  # so that it has room for 16 tokens
    assert len(list(splits.turns(arguments[2], 3, 4, RANK))) == 2
    assert torch.equal(latent_attention(*arguments), together)

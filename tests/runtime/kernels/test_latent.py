import pytest
import torch

from localllm.arch.config import LatentConfig, RopeConfig
from localllm.quant.vectors import EIGHT_BIT_DTYPES
from localllm.runtime.batch import Batch, SequenceSpan
from localllm.runtime.kernels.latent import absorbed_is_cheaper
from localllm.runtime.kv_cache.tensors import LatentCache
from tests.runtime.kernels.harness import COMPILED, check
from tests.runtime.kernels.test_attention import BLOCKS, SIZE, step
from tests.tiny import CPU

RANK, ROPE = 24, 6


def config(heads: int, nope: int, value: int) -> LatentConfig:
    return LatentConfig(heads, None, RANK, nope, ROPE, value, RopeConfig(100.0, ROPE), 0.3, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("heads", "nope", "value"), [(6, 10, 14), (3, 8, 40), (1, 2, 2)])
@pytest.mark.parametrize(
    "spans",
    [[(1, 1)], [(33, 1)], [(40, 40)], [(40, 12)], [(64, 33), (17, 1), (9, 9), (64, 5), (3, 1)]],
    ids=str,
)
@pytest.mark.parametrize("form", [None, *EIGHT_BIT_DTYPES.values()])
def test_latent_attention(
    form: torch.dtype | None,
    spans: list[tuple[int, int]],
    heads: int,
    nope: int,
    value: int,
    scattered: bool,
    dtype: torch.dtype,
) -> None:
    c, batch = config(heads, nope, value), step(spans, scattered)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16()

    q = random(sum(count for _, count in spans), heads, nope + ROPE)
    k_b, v_b = (random(heads, dim, RANK) / 4 for dim in (nope, value))
    rows = random(BLOCKS * SIZE, RANK + ROPE)
    written = torch.zeros(BLOCKS * SIZE, dtype=torch.bool)
    for table, (context, _) in zip(batch.block_table.tolist(), spans, strict=True):
        for position in range(context):
            written[table[position // SIZE] * SIZE + position % SIZE] = True
    rows[~written] = torch.nan  # reading what was never written shows

    def make(d: torch.dtype) -> tuple[torch.Tensor, LatentCache, Batch, LatentConfig, torch.Tensor, torch.Tensor]:
        cache = LatentCache(BLOCKS, SIZE, (RANK, ROPE), form or d, CPU)
        cache.append(rows.to(d), torch.arange(BLOCKS * SIZE))
        return q.to(d), cache, batch, c, k_b.to(d), v_b.to(d)

    few = form is None and any(count <= 16 for _, count in spans)
    assert check("latent_attention", make, dtype, terms=RANK) == ["cpu-tokens"] * (few and COMPILED) + [
        "torch-two-forms"
    ]


def test_few_queries_are_absorbed_and_prompts_expanded() -> None:
    flash = LatentConfig(20, 768, 512, 192, 64, 256, RopeConfig(1e6, 64), 1 / 16, 1e-6)  # GLM-4.7-Flash
    absorbed = [(1, 2), (1, 100_000), (16, 512), (64, 512)]
    whole = [(8, 8), (512, 512), (512, 4096), (512, 100_000)]
    assert all(absorbed_is_cheaper(SequenceSpan(0, count, context, 0), flash) for count, context in absorbed)
    assert not any(absorbed_is_cheaper(SequenceSpan(0, count, context, 0), flash) for count, context in whole)

"""A quantized KV cache in whole models: windows, shared keys, latents, sinks, recurrent states."""

import functools
from pathlib import Path

import pytest
import torch

from localllm.quant.vectors import EIGHT_BIT_DTYPES, INT4, KV_DTYPES, KVDtype, dequantize_vectors
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.tensors import HOST_CHUNK_BLOCKS, KVCache, LatentCache
from localllm.runtime.kv_cache.tiers import CopyRun
from tests.models.families import FAMILIES
from tests.runtime.test_engine import run, sequence, tokens
from tests.tiny import CPU, make_checkpoint, make_engine

KINDS = ("Llama 3.x", "Gemma 3", "Gemma 4, all at once", "DeepSeek-V3", "gpt-oss", "Qwen3-Next")
# Of their standard deviation, as a mean: weights are drawn large, and routers of experts turn at a touch.
MOST_OFF = {"int8": 0.1, "fp8": 0.4, "k8v4": 0.4, "int4": 0.5}
LATENT = "DeepSeek-V3"
CASES = [(family, form) for family in KINDS for form in KV_DTYPES if family != LATENT or form in EIGHT_BIT_DTYPES]
IDS = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Path]:
    return functools.partial(write, tmp_path_factory.mktemp("caches"))


def write(root: Path, family: str) -> Path:
    folder = root / family.replace(" ", "-").replace(",", "")
    if not folder.exists():
        kind, changes = FAMILIES[family]
        make_checkpoint(folder, kind, **changes)
    return folder


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_near_those_of_the_models_own_dtype(
    folders: functools.partial[Path], family: str, form: str
) -> None:
    exact = make_engine(folders(family)).logits(IDS)
    engine = make_engine(folders(family), kv_dtype=KV_DTYPES[form])
    stored = {
        (cache.k.dtype, cache.v.dtype) if isinstance(cache, KVCache) else (cache.latents.dtype,) * 2
        for cache in engine.runner.paged_caches
    }
    kept = KV_DTYPES[form]
    assert stored == {kept if isinstance(kept, tuple) else (kept, kept)}
    off = (engine.logits(IDS) - exact).abs().mean() / exact.std()
    assert 0 < off < MOST_OFF[form]


@pytest.mark.quick_every(11)
@pytest.mark.parametrize(("family", "form"), CASES)
def test_any_mix_gives_each_sequence_the_tokens_it_gets_alone(
    folders: functools.partial[Path], family: str, form: str
) -> None:
    """Covers shared prefixes, copied blocks, and preempted sequences that are recomputed."""

    def engine(blocks: int) -> Engine:
        return make_engine(folders(family), blocks=blocks, token_budget=13, kv_dtype=KV_DTYPES[form])

    prompts = [IDS[:33], IDS[:20], [*IDS[:24], 7, 8, 9], IDS[30:35]]

    def asked(i: int):
        return sequence(prompts[i], temperature=0, max_tokens=12)

    alone = [tokens(answer) for i in range(4) for answer in run(engine(64), [asked(i)]).values()]
    together = [tokens(answer) for answer in run(engine(14), [asked(i) for i in range(4)]).values()]
    assert together == alone


@pytest.mark.parametrize("form", KV_DTYPES.values())
def test_a_copied_block_reads_as_its_source(form: KVDtype) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(3, 4, 2, 8, form, CPU)
    k, v = (torch.randn(4, 2, 8, generator=generator) for _ in range(2))
    cache.append(k, v, torch.tensor([3, 1, 2, 0]))
    cache.copy_blocks(CopyRun(0, 2, 1))
    assert cache.k_scale is not None and cache.v_scale is not None
    for stored, scale, x in ((cache.k, cache.k_scale, cache.rotate(k)), (cache.v, cache.v_scale, v)):
        read = dequantize_vectors(stored, scale, torch.float32)
        assert torch.equal(read[8:], read[:4])
        torch.testing.assert_close(read[[3, 1, 2, 0]], x, atol=0.2, rtol=0)


@pytest.mark.parametrize("form", EIGHT_BIT_DTYPES.values())
def test_a_copied_block_of_latents_reads_as_its_source(form: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = LatentCache(3, 4, (24, 6), form, CPU)
    latents.append(torch.randn(4, 30, generator=generator), torch.arange(4))
    latents.copy_blocks(CopyRun(0, 1, 1))
    assert latents.scale is not None
    assert torch.equal(latents.latents[4:8].float(), latents.latents[:4].float())
    assert torch.equal(latents.scale[4:8], latents.scale[:4])


@pytest.mark.parametrize("form", EIGHT_BIT_DTYPES.values())
def test_a_large_rotated_key_costs_the_latent_no_precision(form: torch.dtype) -> None:
    cache = LatentCache(1, 4, (24, 6), form, CPU)
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    rows[:, 24:] *= 1000
    cache.append(rows, torch.arange(4))
    assert cache.scale is not None
    latent = dequantize_vectors(cache.latents[:, :24], cache.scale[:, 0], torch.float32)
    torch.testing.assert_close(latent, rows[:, :24], atol=0.15, rtol=0)


@pytest.mark.parametrize("form", KV_DTYPES.values())
def test_no_number_among_the_keys_ends_the_answer(folders: functools.partial[Path], form: KVDtype) -> None:
    engine = make_engine(folders("Llama 3.x"), kv_dtype=form)
    cache = engine.runner.paged_caches[0]
    assert isinstance(cache, KVCache)
    append = cache.append

    def spoil(k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor) -> None:
        k = k.clone()
        k[0, 0, 0] = torch.nan
        append(k, v, slot)

    cache.append = spoil
    engine.add_sequence(sequence(IDS[:9], temperature=0))
    events = [event for _ in range(3) for event in engine.step()]
    assert "NaN" in str(events[-1].error)


@pytest.mark.parametrize("form", [*KV_DTYPES, None])
def test_blocks_go_aside_and_come_back_with_their_scales(form: str | None) -> None:
    """Includes runs across the border of a piece, which become two copies."""
    blocks, size = 12, 4
    kind = KV_DTYPES[form] if form else torch.bfloat16
    caches: list[KVCache | LatentCache] = [KVCache(blocks, size, 2, 8, kind, CPU)]
    if isinstance(kind, torch.dtype) and kind != INT4:
        caches.append(LatentCache(blocks, size, (6, 2), kind, CPU))
    for cache in caches:
        for rows in cache.tiered:
            rows.on_device.copy_((torch.randn(rows.on_device.shape) * 9).abs())
        before = [rows.on_device.clone() for rows in cache.tiered]
        far = blocks + HOST_CHUNK_BLOCKS - 3
        cache.copy_blocks(CopyRun(1, far, 7))
        assert all(sorted(rows.host_chunks) == [0, 1] for rows in cache.tiered)
        for rows in cache.tiered:
            rows.on_device.zero_()
        cache.copy_blocks(CopyRun(far + 1, 4, 6))
        for rows, was in zip(cache.tiered, before, strict=True):
            assert torch.equal(rows.on_device[4 * size : 10 * size], was[2 * size : 8 * size])
            assert not rows.on_device[: 4 * size].any() and not rows.on_device[10 * size :].any()
        assert len(cache.tiered) == (1 + (form is not None)) * (2 if isinstance(cache, KVCache) else 1)

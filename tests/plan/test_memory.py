"""Planned bytes equal the bytes of loaded models, and refusals occur at the same sizes."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import localllm
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import DoesNotFit, UsageError
from localllm.plan.activations import activation_bytes
from localllm.plan.fit import shortage_error
from localllm.plan.memory import (
    MAX_RUNNING,
    MIN_RUNNING,
    RUNNING_TOKENS,
    SMALL_CACHE,
    MemoryNeeds,
    allocate,
    check_context,
    host_blocks,
    plan_state_slots,
)
from localllm.plan.weights import weight_bytes
from localllm.quant.vectors import EIGHT_BIT_DTYPES, KV_DTYPES
from localllm.quantize.quantizer import find_or_quantize
from tests.checkpoint import published
from tests.checkpoint.quantized.test_mxfp4 import write_published
from tests.models.families import FAMILIES
from tests.plan.allocated import alive, bytes_of
from tests.plan.published import LLAMA_8B, header_of
from tests.shared import shared
from tests.tiny import make_checkpoint, rounded_copy

KINDS = (
    "Llama 3.x",
    "Qwen2, tied, some windows",
    "Gemma 3",
    "Gemma 4, all at once",
    "DeepSeek-V3",
    "GLM-4.7-Flash",
    "gpt-oss",
    "Qwen3-Next",
    "Qwen3.5-MoE",
    "LFM2",
)


def write_model(folder: Path, family: str) -> Path:
    """Write a complete tiny model, with a tokenizer."""
    kind, changes = FAMILIES[family]
    make_checkpoint(folder, kind, **changes)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(320)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "t0")).save(str(folder / "tokenizer.json"))


def check_held(model: str | Path, dtype: str, kv_dtype: str = "auto", rel: float = 0.005) -> None:
    """Load the model, and check that new live tensors have the planned size."""
    before = {id(tensor) for tensor in alive()}
    with localllm.load(model, device="cpu", dtype=dtype, kv_dtype=kv_dtype) as llm:
        held = bytes_of(tensor for tensor in alive() if id(tensor) not in before)
        held -= 8 * llm.memory.max_running  # the newest token of each sequence
        caches = llm.memory.cache_bytes + llm.memory.state_bytes
        assert llm.memory.weights.total == pytest.approx(held - caches, rel=rel)
        assert llm.memory.total == pytest.approx(held, rel=rel)


@pytest.mark.quick_every(13)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KINDS)
def test_a_loaded_model_takes_the_planned_bytes(tmp_path: Path, family: str, dtype: str) -> None:
    check_held(write_model(tmp_path, family), dtype)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_matrices_of_16_bits_are_counted_as_stored_in_float32(
    tmp_path: Path, family: str, stored: torch.dtype
) -> None:
    check_held(rounded_copy(write_model(tmp_path / "made", family), tmp_path / "rounded", stored), "float32")


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, form) for family in ("Gemma 4, all at once", "Qwen3-Next") for form in KV_DTYPES),
        *(("DeepSeek-V3", form) for form in EIGHT_BIT_DTYPES),
    ],
)
def test_quantized_keys_and_values_are_counted_with_their_scales(tmp_path: Path, family: str, form: str) -> None:
    check_held(write_model(tmp_path, family), "bfloat16", form)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_counted_packed_where_it_stays_packed(dtype: str) -> None:
    check_held("demo", dtype)


def test_mxfp4_is_counted_as_it_is_stored(tmp_path: Path) -> None:
    write_published(tmp_path)
    write_tokenizer(tmp_path)
    check_held(tmp_path, "bfloat16")


@pytest.mark.quick_every(11)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "bfloat16") for layout in [*published.LAYOUTS, "W8A8"]),
        *((layout, "float32") for layout in ("awq", "W8A16", "int-quantized", "fp8, blocks")),
    ],
)
def test_packed_words_and_bytes_are_counted_as_they_are_kept(tmp_path: Path, layout: str, dtype: str) -> None:
    published.write(tmp_path, *published.LAYOUTS.get(layout, published.W8A8))
    write_tokenizer(tmp_path)
    check_held(tmp_path, dtype)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_gguf_are_counted_as_they_are_mapped(dtype: str) -> None:
    check_held(shared("gguf/model-q4_k_m.gguf"), dtype)


def test_an_oversized_context_names_one_that_fits() -> None:
    needs = needs_of(LLAMA_8B)
    weights, block = needs.weights.total, 16 * 131_072
    roomy = allocate(needs, 10**12)
    assert (roomy.context, roomy.blocks) == (131_072, 8 * 131_072 // 16)
    assert allocate(needs, 10**12, 4096).blocks == 8 * 4096 // 16
    tight = weights + needs.workspace(4096) + 2 * 256 * block  # of which half is for contexts
    assert allocate(needs, tight, 4096).blocks == allocate(needs, tight).blocks == 256
    assert allocate(needs, tight).context == allocate(needs, tight).max_context == 4096
    with pytest.raises(DoesNotFit, match=r"a context of 5000 tokens needs .* --context 4096 fits"):
        allocate(needs, tight, 5000)
    with pytest.raises(DoesNotFit, match="free memory"):
        allocate(needs, weights + needs.workspace(16))


def test_a_gpu_gives_its_cache_more_and_has_a_workspace_of_its_own() -> None:
    cpu, gpu = needs_of(LLAMA_8B), needs_of(LLAMA_8B, "cuda")
    step = activation_bytes(gpu.config, "bfloat16", 2048, 4096, sequences=32 + 79, on_gpu=True)  # with drafts
    assert gpu.workspace(4096) - step == 2**28 + 2**26 and cpu.workspace(4096) < step
    left = 10 * 2**30
    for needs, share in ((gpu, 0.9), (cpu, 0.5)):
        free = needs.weights.total + needs.workspace(4096) + left
        assert allocate(needs, free, 4096).max_blocks == int(share * left) // needs.block_bytes


def test_blocks_are_put_aside_in_a_quarter_of_main_memory_and_for_no_more_than_eight_contexts() -> None:
    memory = allocate(needs_of(LLAMA_8B, "cuda"), 40 * 10**9, 4096)
    assert host_blocks(memory, 10**12) == 8 * 256
    assert host_blocks(memory, 400 * memory.block_bytes) == 100
    assert host_blocks(memory, 0) == 0


def test_a_shortage_is_explained_with_the_best_remedy() -> None:
    memory = allocate(needs_of(LLAMA_8B, "cuda"), 40 * 10**9, 32_768)
    told = shortage_error(memory, "cuda:0", "bfloat16", quantized=False)
    assert told.exit_code == 3
    assert told.message == (
        "cuda:0 is out of memory; 38.5 GB were planned: 16.1 GB for weights, 20.9 GB for a cache of 159712 "
        "tokens, 1.51 GB for a step"
    )
    assert (told.remedy or "").endswith("use less with --quant int4 or --context 16384 or --kv-dtype int8")
    told = shortage_error(memory, "cuda:0", "int8", quantized=True)
    assert (told.remedy or "").endswith("use less with --context 16384")


def needs_of(config: dict[str, Any], kind: str = "cpu") -> MemoryNeeds:
    model = parse_config(config)
    return MemoryNeeds(
        "a model", model, weight_bytes(header_of(config), model, "bfloat16", kind), kind, "bfloat16", "bfloat16"
    )


def test_recurrent_states_take_an_eighth_of_the_free_memory() -> None:
    large = SMALL_CACHE // 64
    assert plan_state_slots(0, 100, "cpu") == 0
    assert plan_state_slots(large, 10**11, "cpu") == plan_state_slots(large, 10**11, "cuda") == 64
    assert plan_state_slots(1000, 10**9, "cpu") == 2 * MAX_RUNNING["cpu"]
    assert plan_state_slots(1000, 80_000, "cpu") == 10
    with pytest.raises(DoesNotFit, match="two states"):
        plan_state_slots(1000, 15_000, "cpu")


def test_as_many_sequences_run_as_the_cache_and_a_step_have_room_for() -> None:
    cpu, gpu = needs_of(LLAMA_8B), needs_of(LLAMA_8B, "cuda")
    for needs in (cpu, gpu):
        roomy = allocate(needs, 10**12, 4096)
        assert roomy.max_running == 8 * 4096 // RUNNING_TOKENS == 128
        assert roomy.workspace == needs.workspace(4096, 128) > needs.workspace(4096)
        assert allocate(needs, 10**12, 1024).max_running == MIN_RUNNING  # 8 contexts of 1024 tokens
    assert allocate(cpu, 10**12, 16_384).max_running == MAX_RUNNING["cpu"] == 128
    assert allocate(gpu, 10**12, 16_384).max_running == MAX_RUNNING["cuda"] == 256


def test_more_sequences_take_no_memory_from_weights_or_cache() -> None:
    gpu = needs_of(LLAMA_8B, "cuda")
    for left in range(2 * 10**9, 40 * 10**9, 10**9):
        free = gpu.weights.total + gpu.workspace(4096) + left
        memory = allocate(gpu, free, 4096)
        assert memory.total + memory.workspace <= free
        assert memory.max_blocks == int(0.9 * left) // gpu.block_bytes
    tight = allocate(gpu, gpu.weights.total + gpu.workspace(4096) + 4 * 10**9, 4096)
    assert MIN_RUNNING < tight.max_running < tight.blocks * 16 // RUNNING_TOKENS


def test_a_small_cache_holds_a_context_for_every_sequence() -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    needs = needs_of({**LLAMA_8B, **small, "num_key_value_heads": 1, "head_dim": 16})
    memory = allocate(needs, 10**10, 1024)
    assert memory.max_running == MAX_RUNNING["cpu"]
    assert memory.blocks == MAX_RUNNING["cpu"] * 1024 // 16
    assert memory.cache_bytes <= SMALL_CACHE
    assert allocate(needs, needs.weights.total + needs.workspace(1024) + 10**6, 1024).max_running == MIN_RUNNING


def test_a_context_that_the_model_does_not_have() -> None:
    check_context(512, None)
    check_context(512, 512)
    for asked in (0, 513, 64.5, True):
        with pytest.raises(UsageError, match="up to 512"):
            check_context(512, asked)  # pyright: ignore[reportArgumentType]


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", ["Llama, tied", "Qwen3", "Mixtral"])
def test_a_quantized_model_takes_the_planned_bytes(tmp_path: Path, family: str, quant: str, dtype: str) -> None:
    header = read_header(write_model(tmp_path / "model", family))
    told = weight_bytes(header, parse_config(header.config), dtype, "cpu", quant)
    small = find_or_quantize(header, quant, tmp_path / "home")
    found = read_header(small)
    assert weight_bytes(found, parse_config(found.config), dtype, "cpu") == told
    check_held(small, dtype, rel=0.02)  # tiny matrices whose rows are no whole tiles share one

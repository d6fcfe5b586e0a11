"""Estimated activation memory of a step, compared with live torch storages during a step."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.arch.config import MoEConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.hub.resolve import resolve_model
from localllm.metrics import Stopwatch
from localllm.plan.activations import activation_bytes, dequantized_matrix_bytes, split_workspace_bytes
from localllm.quant.vectors import EIGHT_BIT_DTYPES, KV_DTYPES
from localllm.request import Request, SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.sequence import Sequence
from tests.checkpoint import published
from tests.models.families import FAMILIES
from tests.plan.allocated import Peak
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine, rounded_copy

KINDS = ("Llama 3.x", "Gemma 3", "Gemma 2", "DeepSeek-V3", "Qwen3-Next", "Qwen3.5", "LFM2", "gpt-oss", "Mixtral")
WIDE: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
CHUNK, PROMPT = 512, 1536
LEAST, MOST = 0.9, 1.15  # of what was measured
MOST_OF_MIXTURES = 1.4  # their busiest expert may get more tokens than it got


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Disable gradients without inference mode, which would hide the memory of composite operations."""
    with torch.no_grad():
        yield


def peak_of(engine: Engine) -> int:
    """Peak bytes of a prefill step with sampling."""
    ids = tuple(torch.randint(3, 500, (PROMPT,)).tolist())
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    request = Request(ids, params, 0.0, False, ())
    watch = Stopwatch(0.0)
    engine.add_sequence(Sequence(request, seed=1, eos_ids=frozenset(), max_len=PROMPT + 1, stopwatch=watch))
    most, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)  # a mode sees what its own thread does
    while engine.has_unfinished_requests:
        with Peak() as peak:
            engine.step()
        most = max(most, peak.most)
    torch.set_num_threads(threads)
    return most


@pytest.mark.quick_every(13)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KINDS)
def test_the_estimate_is_near_the_measured_peak(tmp_path: Path, family: str, dtype: str) -> None:
    kind, changes = FAMILIES[family]
    own = {} if kind.startswith("Deepseek") else {"head_dim": 32}
    make_checkpoint(tmp_path, kind, **changes | WIDE | own)
    check_peak(tmp_path, dtype)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("family", ["Llama 3.x", "Mixtral"])
def test_the_estimate_knows_what_is_widened(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path / "made", kind, **changes | WIDE | {"head_dim": 32, "intermediate_size": 2048})
    check_peak(rounded_copy(tmp_path / "made", tmp_path / "rounded", torch.bfloat16), "float32")


@pytest.mark.quick_every(5)
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        *((family, kv_dtype) for family in ("Llama 3.x", "Gemma 3", "gpt-oss") for kv_dtype in KV_DTYPES),
        *(("DeepSeek-V3", kv_dtype) for kv_dtype in EIGHT_BIT_DTYPES),
    ],
)
def test_the_estimate_includes_dequantized_weights(tmp_path: Path, family: str, kv_dtype: str) -> None:
    kind, changes = FAMILIES[family]
    own = {} if kind.startswith("Deepseek") else {"head_dim": 32}
    make_checkpoint(tmp_path, kind, **changes | WIDE | own)
    check_peak(tmp_path, "bfloat16", kv_dtype)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_includes_delta_nets(tmp_path: Path, dtype: str) -> None:
    kind, changes = FAMILIES["Qwen3.5"]
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 16}
    make_checkpoint(tmp_path, kind, **changes | WIDE | sizes | heads)
    check_peak(tmp_path, dtype)


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("family", ["Llama 3.x", "DeepSeek-V3", "Qwen3.5", "gpt-oss"])
def test_a_deterministic_step_needs_no_more_memory(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    own = {} if kind.startswith("Deepseek") else {"head_dim": 32}
    make_checkpoint(tmp_path, kind, **changes | WIDE | own)
    check_peak(tmp_path, "bfloat16", deterministic=True)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("model", ["demo", "gguf/model-q4_k_m.gguf"])
def test_the_estimate_is_near_the_peak_with_packed_weights(model: str) -> None:
    check_peak(resolve_model(model).path if model == "demo" else shared(model), "bfloat16")


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("layout", ["W4A16", "awq", "gptq, desc_act", "W8A16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_near_the_peak_with_quantized_weights(tmp_path: Path, layout: str, dtype: str) -> None:
    changes = WIDE | {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
    published.write(tmp_path, *published.LAYOUTS.get(layout, published.W8A8), **changes)
    check_peak(tmp_path, dtype)


def test_a_long_context_makes_keys_of_a_few_heads_at_a_time(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["DeepSeek-V3"][0], **FAMILIES["DeepSeek-V3"][1])
    config = parse_config(read_header(tmp_path).config)  # heads of 22
    short, long = (activation_bytes(config, "bfloat16", 512, context) for context in (2**17, 2**18))
    masks = 10 * 512 * 2**17
    assert long - short < masks + 3 * 2 * 2**25


@pytest.mark.parametrize("family", ["Llama 3.x", "Gemma 2", "Gemma 3", "gpt-oss"])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
def test_what_gpu_kernels_do_not_make_is_not_reserved(tmp_path: Path, family: str, kv_dtype: str | None) -> None:
    """They make no masks and no scores, and read 8-bit keys as they are: a longer context takes no more."""
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes | WIDE)
    config = parse_config(read_header(tmp_path).config)

    def step(context: int, dtype: str = "bfloat16", on_gpu: bool = True) -> int:
        return activation_bytes(config, dtype, 2048, context, kv_dtype=kv_dtype, on_gpu=on_gpu)

    assert step(2**17) == step(2**11)
    assert step(2**17, on_gpu=False) > step(2**11, on_gpu=False)
    wide = replace(config, layers=tuple(replace(x, mixer=replace(x.mixer, head_dim=1024)) for x in config.layers))
    assert step(2**17) < activation_bytes(wide, "float32", 2048, 2**17, on_gpu=True)  # which no kernel attends to


def test_the_workspace_of_split_contexts_is_reserved(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *FAMILIES["Llama 3.x"][:1], **FAMILIES["Llama 3.x"][1] | WIDE)
    config = parse_config(read_header(tmp_path).config)
    assert split_workspace_bytes(config) == 2**26
    assert activation_bytes(config, "bfloat16", 1, 1, on_gpu=True) > 2**26
    wide = replace(config, layers=tuple(replace(x, mixer=replace(x.mixer, heads=2048)) for x in config.layers))
    assert split_workspace_bytes(wide) > 2**26  # for the 16 tokens that a sequence may bring


def check_peak(model: Path, dtype: str, kv_dtype: str | None = None, deterministic: bool = False) -> None:
    """Check the planned peak memory of a step. deterministic: the step may use less than planned."""
    sizes = {"blocks": 200, "block_size": 16, "context": 2048}
    kept = KV_DTYPES[kv_dtype] if kv_dtype else None
    engine = make_engine(model, getattr(torch, dtype), kv_dtype=kept, deterministic=deterministic, **sizes)
    header = read_header(model)
    unpacked = dequantized_matrix_bytes(header, dtype, "cpu")
    told = activation_bytes(
        parse_config(header.config), dtype, CHUNK, PROMPT, matrix_bytes=unpacked, kv_dtype=kv_dtype
    )
    mixture = any(isinstance(layer.ffn, MoEConfig) for layer in engine.runner.model.config.layers)
    share = told / peak_of(engine)
    assert share >= LEAST
    assert share <= (MOST_OF_MIXTURES if mixture else MOST) or deterministic


def test_drawing_a_token_for_many_takes_more_than_a_small_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", vocab_size=50_000)
    config = parse_config(read_header(tmp_path).config)
    assert activation_bytes(config, "bfloat16", 32, 100, sequences=32) >= 32 * 50_000 * 3 * 4

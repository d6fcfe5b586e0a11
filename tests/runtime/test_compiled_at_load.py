"""All kernels of an answer are compiled while a model loads, in steps that compute nothing and leave nothing."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import localllm
from bench import gguf_checkpoint
from localllm.request import SamplingParams
from localllm.runtime.kernels import cpu
from localllm.runtime.kernels.cpu import compile as compiling
from localllm.runtime.kernels.cpu.compile import CompileOnce, KernelSource, cpu_supported
from localllm.runtime.model_loader import compile_kernels
from localllm.settings import Settings
from tests.llm import encoder_checkpoints
from tests.models.families import FAMILIES
from tests.shared import shared
from tests.tiny import make_checkpoint, make_engine, rounded_copy

SMALL_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROMPTS = ([7], [7, 8, 9], list(range(3, 60)), [5, 6, 7, 8] * 30)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of compiled kernels, with empty caches in memory and on disk before."""
    if not cpu_supported():
        pytest.skip("no kernel is compiled for this processor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}."):
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, CompileOnce):
                monkeypatch.setattr(kernel, "compiled_kernels", {})
    names: list[str] = []
    machine_code = compiling.machine_code

    def record(source: KernelSource, properties: tuple[object, ...]) -> bytes:
        names.append(f"{source.name} {properties}")
        return machine_code(source, properties)

    monkeypatch.setattr(compiling, "machine_code", record)
    yield names


def answer_all(llm: localllm.LLM) -> None:
    """Answer prompts of several lengths, first alone and then together."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt in PROMPTS:
        llm.generate(list(prompt), params)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: llm.generate([*prompt, 11], params), PROMPTS))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "int8"},
        {"dtype": "bfloat16", "kv_dtype": "k8v4"},
        {"deterministic": True, "threads": 3},
        {"dtype": "float32", "stored": torch.bfloat16},
        {"dtype": "float32", "activations": "24", "draft_model": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["stories260K", "demo", "Q4_0", "Q4_K_M"])
@pytest.mark.quick_every(9)
def test_no_kernel_is_compiled_after_loading(
    model: str, options: dict[str, Any], compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = model
    if model.startswith("Q4"):
        for key, number in SMALL_SHAPE.items():
            monkeypatch.setitem(gguf_checkpoint.SHAPE, key, number)
        gguf_checkpoint.make(tmp_path / "model.gguf", model)
        name = str(tmp_path / "model.gguf")
    elif model == "stories260K":
        folder = shared(model)
        stored = options.get("stored")
        name = str(rounded_copy(folder, tmp_path / "rounded", stored) if stored else folder)
    settings = dataclasses.replace(
        Settings.from_environment(),
        home=tmp_path / "home",
        activations=options.get("activations", "auto"),
        threads=options.get("threads"),
    )
    given = {key: options[key] for key in ("dtype", "kv_dtype", "deterministic") if key in options}
    draft = {"draft_model": name} if options.get("draft_model") else {}
    with localllm.load(name, device="cpu", settings=settings, **given, **draft) as llm:
        assert llm.load_phases["compile"] > 0
        assert {entry.partition(" ")[0] for entry in compiled} >= {"attention", "gated", "rms_norm"}
        during_load = len(compiled)
        answer_all(llm)
        assert compiled[during_load:] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", encoder_checkpoints.FAMILIES)
@pytest.mark.quick_every(7)
def test_no_kernel_of_an_encoder_is_compiled_after_loading(
    family: str, dtype: str, compiled: list[str], tmp_path: Path
) -> None:
    encoder_checkpoints.make_encoder(tmp_path, family)
    encoder_checkpoints.sentence_transformer(tmp_path, encoder_checkpoints.MEAN)
    with localllm.load_embedder(tmp_path, device="cpu", dtype=dtype) as embedder:
        assert any(entry.startswith("dense_matmul") for entry in compiled)
        during_load = len(compiled)
        for lengths in ([1], [2], [3], [7], [40], [1, 1, 3, 3, 3, 17]):
            embedder.embed([list(range(5, 5 + length)) for length in lengths])
        assert compiled[during_load:] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_every_family_are_compiled_without_a_trace(
    family: str, compiled: list[str], tmp_path: Path
) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path / "model", kind, **changes)
    with torch.inference_mode():
        engine, other = make_engine(tmp_path / "model"), make_engine(tmp_path / "model")
        compile_kernels(engine.runner, engine.pool, torch.get_num_threads())
        count = len(compiled)
        for tokens in ([3], [3, 4], [3, 4, 5, 6, 7], list(range(3, 40))):
            logits = engine.logits(tokens)
            assert compiled[count:] == []
            assert torch.isfinite(logits).all()
            assert torch.equal(logits, other.logits(tokens))

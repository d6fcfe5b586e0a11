"""Products, attention and the recurrence with the instructions of older processors, each in its own process:
compiled kernels give the same bits with AVX2 as with AVX-512, and torch alone nearly the same numbers.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import localllm
from localllm.arch.config import AttentionConfig, DeltaNetConfig
from localllm.hardware import processor
from localllm.request import SamplingParams
from localllm.runtime import kernels
from localllm.runtime.kernels import explain, prepare_weights
from localllm.runtime.kv_cache.tensors import KVCache, RecurrentCache
from localllm.settings import Settings
from tests.quant.formats.test_interleaved import blocks, integers
from tests.runtime.kernels import test_attention, test_delta_net
from tests.shared import DATA, shared
from tests.tiny import CPU, rounded_copy

ROOT = Path(__file__).parents[4]
CALLS: list[tuple[str, str]] = []  # operations, and the kernels that they chose


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def called(operation: str, *arguments: Any) -> torch.Tensor:
    CALLS.append((operation, next(name for name, reason in explain(operation, *arguments) if reason == "ok")))
    return getattr(kernels, {"plain_linear": "linear"}.get(operation, operation))(*arguments)


def results() -> dict[str, torch.Tensor]:
    """Return the results of operations for fixed arguments, and the kernels that computed them."""
    found = {}
    weights = {form: integers(form, 21, 300, 32, zeros=True) for form in ("int4", "int8")}
    weights["q4_k"] = blocks("q4_k", 37, 512)
    for dtype in (torch.float32, torch.bfloat16):
        for form, stored in weights.items():
            [weight] = prepare_weights(stored)
            for rows in (1, 5, 65) if dtype == torch.float32 else (1, 5):
                x = numbers(rows, stored.shape[1]).to(dtype)
                found[f"{form} {rows} {dtype}"] = called("linear", x, weight, None)
        for rows in (1, 5):
            x, weight = numbers(rows, 99).to(dtype), numbers(13, 99).to(dtype)
            found[f"plain {rows} {dtype}"] = called("plain_linear", x, weight, None)
            if dtype == torch.float32:
                found[f"widened {rows} {dtype}"] = called("plain_linear", x, weight.bfloat16(), None)
        found[f"attention {dtype}"] = attended(dtype)
        found[f"recurrence {dtype}"], found[f"state {dtype}"] = gone_on(dtype)
    return found


def attended(dtype: torch.dtype) -> torch.Tensor:
    spans = [(33, 1), (40, 12)]
    batch, slots = test_attention.step(spans, True), test_attention.BLOCKS * test_attention.SIZE
    cache = KVCache(test_attention.BLOCKS, test_attention.SIZE, 2, 10, dtype, CPU)
    cache.append(numbers(slots, 2, 10).to(dtype), numbers(slots, 2, 11)[..., :10].to(dtype), torch.arange(slots))
    config = AttentionConfig(6, 2, 10, None, 0.3, None, 5.0)
    return called("attention", numbers(13, 6, 10).to(dtype), cache, batch, config, None)


def gone_on(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    config = DeltaNetConfig(key_heads=2, value_heads=6, key_dim=8, value_dim=12, kernel_size=4)
    batch = test_delta_net.step([(7, 1), (70, 68)], True)
    q, k = (torch.nn.functional.normalize(numbers(69, 2, 8 + i)[..., :8], dim=-1) for i in range(2))
    decay, beta = -numbers(69, 6).square(), numbers(69, 6, 1)[..., 0].sigmoid()
    cache = RecurrentCache(test_delta_net.ROWS, config, dtype, CPU)
    cache.matrix = numbers(test_delta_net.ROWS, *config.state_shape)
    made = called("delta_net", q, k, numbers(69, 6, 12).to(dtype), decay, beta, cache, batch)
    return made, cache.matrix


def at_level(level: str, file: Path) -> tuple[list[tuple[str, str]], dict[str, torch.Tensor]]:
    """Return the choices and results of a process that is limited to a level."""
    run_at_level(level, str(file))
    return torch.load(file)


@pytest.fixture(scope="module")
def here() -> dict[str, torch.Tensor]:
    return results()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["avxvnni", "avx2"])
def test_lower_levels_give_the_same_bits(level: str, here: dict[str, torch.Tensor], tmp_path: Path) -> None:
    if not processor.reaches_level(processor.host_features(), level):
        pytest.skip(f"the processor does not reach {level}")
    calls, found = at_level(level, tmp_path / "found")
    assert {name for _, name in calls} == {
        "cpu-interleaved",
        "cpu-interleaved-dequantized",
        "cpu-rows",
        "cpu-tokens",
    }
    different = [name for name, expected in here.items() if not torch.equal(found[name], expected)]
    assert not different


@pytest.mark.slow
def test_without_compiled_kernels_torch_gives_the_same_numbers(
    here: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    calls, found = at_level("baseline", tmp_path / "found")
    assert not {name for _, name in calls} & {
        "cpu-interleaved",
        "cpu-interleaved-dequantized",
        "cpu-rows",
        "cpu-tokens",
    }
    for name, expected in here.items():
        step = 2e-5 if "float32" in name else 2e-2
        size = expected.float().abs().max().item()
        torch.testing.assert_close(found[name].float(), expected.float(), atol=step * size, rtol=step)


def greedy_tokens(home: Path) -> dict[str, list[int]]:
    """Return the greedy answers of a model in each format, in float32 with 16-bit activations."""
    settings = replace(Settings.from_environment(), home=home, activations="16")
    models = {form: (DATA / "gguf" / f"model-{form}.gguf", None) for form in ("q4_0", "q8_0", "q4_k_m")}
    models |= {form: (DATA / "stories260K", form) for form in ("int4", "int8")}
    models["bfloat16"] = (rounded_copy(DATA / "stories260K", home / "rounded", torch.bfloat16), None)
    answers = {}
    for form, (model, quant) in models.items():
        with localllm.load(model, dtype="float32", quant=quant, settings=settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            answers[form] = llm.generate(list(range(3, 90)), params).token_ids
    return answers


@pytest.mark.slow
def test_every_level_gives_the_same_greedy_tokens(tmp_path: Path) -> None:
    """Includes torch alone, with dequantized weights."""
    shared("gguf")
    expected = None
    for level in ("baseline", "avx2", "avxvnni", "avx512"):
        if processor.reaches_level(processor.host_features(), level):
            found = json.loads(run_at_level(level, "greedy", str(tmp_path)))
            assert set(found) == {"q4_0", "q8_0", "q4_k_m", "int4", "int8", "bfloat16"}
            assert found == (expected or found), level
            expected = found


def run_at_level(level: str, *arguments: str) -> str:
    """Run this file in a process that is limited to a level, and return its stdout."""
    environment = os.environ | {"LOCALLLM_CPU": level, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", __name__, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    if sys.argv[1] == "greedy":
        print(json.dumps(greedy_tokens(Path(sys.argv[2]))))
        sys.exit()
    with torch.inference_mode():
        torch.set_num_threads(1)
        made = results()
    torch.save((CALLS, made), sys.argv[1])

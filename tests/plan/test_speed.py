"""The step reads that a loaded model reports equal those of its plan at any context."""

from pathlib import Path

import pytest
import torch

import localllm
from localllm.arch.cost import SequenceStep, bytes_read, kv_bytes_per_token, why_not_4_bit_cache
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.hardware.measure import Rates, RateSetup, _write, stored_rates
from localllm.plan.runs import MIN_OUTPUT_TOKENS
from localllm.plan.speed import step_reads
from localllm.plan.weights import weight_bytes
from localllm.quant.packing import kv_element_bytes
from localllm.request import SamplingParams
from localllm.settings import Settings
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint

CPU = torch.device("cpu")
KINDS = ("Llama 3.x", "Gemma 3", "Gemma 4, like E2B", "DeepSeek-V3", "Qwen3-Next", "LFM2", "Mixtral", "gpt-oss")


@pytest.mark.parametrize("family", KINDS)
def test_a_step_reads_the_planned_bytes_at_any_context(tmp_path: Path, family: str) -> None:
    kind, changes = FAMILIES[family]
    make_checkpoint(tmp_path, kind, **changes)
    header = read_header(tmp_path)
    config = parse_config(header.config)
    weights = weight_bytes(header, config, "float32", "cpu")
    for kv_dtype in ("float32", "int8", *(() if why_not_4_bit_cache(config) else ("k8v4", "int4"))):
        told = step_reads(config, weights, "float32", kv_dtype, 1.0, None)
        for context in (0, 1, 5, 9, 10, 41, 200):
            counted = bytes_read(config, weights, (SequenceStep(1, context),), 4, kv_element_bytes(kv_dtype))
            assert told.bytes_per_step(context) == counted
        assert told.bandwidth_fraction(10.0, 41) is None


def keep(settings: Settings, dtype: torch.dtype, read: float) -> None:
    def fail(text: str) -> None:
        raise AssertionError(text)

    _write(settings.home / "rates.json", {RateSetup.of(CPU, dtype): Rates(1.0, read, 1.0, 1.0)}, fail)


def test_saved_rates_are_used_without_measuring(tmp_path: Path) -> None:
    settings = Settings(tmp_path, "cpu", "float32", None)
    assert stored_rates(CPU, torch.float32, settings) is None
    keep(settings, torch.float32, 5e9)
    found = stored_rates(CPU, torch.float32, settings)
    assert found and found.read == 5e9
    assert stored_rates(CPU, torch.bfloat16, settings) is None
    assert stored_rates(CPU, torch.float32, Settings(tmp_path, "cpu", "float32", 77)) is None


def test_a_loaded_model_reports_its_reads_and_rates(tmp_path: Path) -> None:
    settings = Settings(tmp_path, "cpu", "auto", None)
    with localllm.load("demo", device="cpu", settings=settings) as llm:
        assert llm.reads.bandwidth is None
        assert llm.reads.kept_per_token == kv_bytes_per_token(llm.config, *kv_element_bytes(llm.kv_dtype))
        assert llm.reads.bytes_per_step(64) == llm.reads.weights + 64 * llm.reads.per_token
        assert (llm.blocks, llm.block_tokens) == (llm.stats().blocks, llm.stats().block_tokens)
        kind = getattr(torch, llm.dtype)
        answer = llm.generate([7] * 80, SamplingParams(max_tokens=2 * MIN_OUTPUT_TOKENS, ignore_eos=True))
        llm.record(answer.metrics, tmp_path, print)
    keep(settings, kind, 1.0)  # which an answer has more than reached
    with localllm.load("demo", device="cpu", settings=settings, draft="off") as llm:
        assert llm.reads.bandwidth
        assert llm.reads.bandwidth >= 1.0
    keep(settings, kind, 1e18)
    with localllm.load("demo", device="cpu", settings=settings) as llm:
        assert llm.reads.bandwidth == 1e18
        assert llm.reads.bandwidth_fraction(100.0, 64) == pytest.approx(llm.reads.bytes_per_step(64) * 1e-16)

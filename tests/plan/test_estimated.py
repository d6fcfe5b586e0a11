"""Estimates for GPUs that were never measured follow the model of a step in docs/kernels.md."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.arch.describe import parse_config
from localllm.hardware.catalog import device_names, find_device
from localllm.plan.estimated import Estimate, estimate_decoding, formats_by_use, gguf_format, gpu_costs
from localllm.plan.fit import LoadOptions, fit_model
from localllm.plan.plan import plan_model
from localllm.quant.packing import GGUF_GPU_PACKED
from tests.plan.published import DEEPSEEK_V3, LLAMA_1B, LLAMA_8B, LLAMA_70B, header_of

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
CONTEXT = 2048  # of the page
MODELS = {"Llama 3.2 1B, INT4": LLAMA_1B, "Llama 3.1 8B, INT4": LLAMA_8B, "Llama 3.1 70B, INT4": LLAMA_70B}
ROW = re.compile(
    r"^\| (Llama [^|]+) \| ([^|]+) \| \d+ \| [\d.]+ GB \| ([\d.]+) ms[^|]+\| ([\d.]+) ms", re.MULTILINE
)


def estimate(config: dict[str, Any], gpu: str, context: int = CONTEXT, quant: str | None = "int4") -> Estimate:
    header, parsed = header_of(config), parse_config(config)
    options = LoadOptions(context, quant=quant)
    # Memory does not matter here.
    roomy = replace(find_device(gpu), memory_bytes=10**12)
    fit = fit_model(header, parsed, roomy, options, name="llama")
    found = estimate_decoding(header, parsed, fit, roomy)
    assert found
    return found


@pytest.mark.parametrize(("model", "gpu", "best_ms", "worst_ms"), ROW.findall(PAGE.read_text(encoding="utf-8")))
def test_estimates_agree_with_those_of_each_launch(model: str, gpu: str, best_ms: str, worst_ms: str) -> None:
    """Which also count programs that are not a multiple of the multiprocessors."""
    rate = estimate(MODELS[model], gpu).tokens_per_s
    assert 1e3 / rate.fastest == pytest.approx(float(best_ms), rel=0.2)
    assert 1e3 / rate.slowest == pytest.approx(float(worst_ms), rel=0.2)


def test_every_gpu_of_the_catalogue_has_an_estimate_below_its_ceiling() -> None:
    for name in device_names():
        gpu = replace(find_device(name), memory_bytes=10**12)
        plan = plan_model(header_of(LLAMA_8B), gpu, LoadOptions(1024), name="llama")
        assert plan.estimate and "not measured" in plan.estimate.source
        for rate, ceiling in (
            (plan.estimate.first_tokens_per_s, plan.chosen.ceiling.first_tokens_per_s),
            (plan.estimate.tokens_per_s, plan.chosen.ceiling.tokens_per_s),
        ):
            assert 0.2 * ceiling < rate.slowest < rate.fastest < ceiling


def test_fewer_bits_and_shorter_contexts_are_faster_where_bandwidth_limits() -> None:
    rates = [estimate(LLAMA_8B, "a100", quant=quant).tokens_per_s.fastest for quant in (None, "int8", "int4")]
    assert rates == sorted(rates)
    long = estimate(LLAMA_8B, "a100", 65_536)
    assert long.tokens_per_s.fastest < 0.9 * long.first_tokens_per_s.fastest


def test_an_architecture_without_counts_of_its_own_names_the_similar_one() -> None:
    assert "for sm_89, as for sm_86" in estimate(LLAMA_8B, "3090").source
    assert gpu_costs(75) is None


def test_layers_whose_launches_were_not_counted_have_no_estimate() -> None:
    plan = plan_model(header_of(DEEPSEEK_V3), find_device("b200"), LoadOptions(1024), name="deepseek")
    assert plan.estimate is None  # its attention is latent
    header, config, gpu = header_of(DEEPSEEK_V3), parse_config(DEEPSEEK_V3), find_device("b200")
    fit = fit_model(header, config, replace(gpu, memory_bytes=10**13), LoadOptions(1024), name="deepseek")
    assert fit.fits and estimate_decoding(header, config, fit, gpu) is None


def test_a_measured_device_has_no_estimate() -> None:
    machine = replace(find_device("h100"), cores=None)
    assert plan_model(header_of(LLAMA_8B), machine, LoadOptions(1024), name="llama").estimate is None


def test_formats_follow_the_quantization() -> None:
    header, config = header_of(LLAMA_8B), parse_config(LLAMA_8B)
    assert formats_by_use(header, config, None) == {"layers": "bf16", "head": "bf16"}
    assert formats_by_use(header, config, "int4") == {"layers": "int4", "head": "int8"}
    assert formats_by_use(header, config, "q4_k_m") == {"layers": "q4_k", "head": "q6_k"}


def test_every_block_format_that_gpus_pack_has_counts() -> None:
    costs = gpu_costs(90)
    assert costs and all(gguf_format(name) in costs.cycles for name in GGUF_GPU_PACKED)

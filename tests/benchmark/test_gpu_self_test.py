"""The self-test of a GPU at tiny shapes: it detects wrong kernels, measures, and its rates reach `plan`."""

from pathlib import Path
from typing import Any

import pytest

from localllm.benchmark.gpu import self_test
from localllm.benchmark.gpu.generated import DEEPSEEK, GPT_OSS, QWEN3_5, TINY
from localllm.benchmark.gpu.self_test import CHECKS, MEASURED, PRODUCTS, ROWS, layers, run_self_test
from localllm.benchmark.gpu.self_test_report import SelfTest, StepRate, self_test_rows, store
from localllm.cli.plan_page import format_plan
from localllm.hardware.catalog import find_device
from localllm.plan.expected import expect_on_catalogued
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import plan_model
from localllm.runtime.kernels.registry import KERNELS, prefer_kernel
from localllm.settings import Settings
from tests.interpreted import TRITON
from tests.plan.published import LLAMA_8B, header_of
from tests.tiny import CPU

SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "vocab_size": 320, "moe_intermediate_size": 32},
}
TINY_CHECKS = (
    ("Llama", layers(TINY, 1, vocab_size=320), "int4", "int8"),
    (
        "gpt-oss",
        layers(GPT_OSS | SMALL, 1, vocab_size=320, num_local_experts=2, num_experts_per_tok=1),
        "mxfp4",
        None,
    ),
    (
        "DeepSeek",
        layers(DEEPSEEK | SMALL, 2, vocab_size=320, n_routed_experts=2, num_experts_per_tok=1, kv_lora_rank=32)
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4},
        "bf16",
        "fp8",
    ),
    (
        "Qwen3.5",
        layers(QWEN3_5 | SMALL, 2, vocab_size=320, layer_types=["linear_attention", "full_attention"])
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16},
        "bf16",
        None,
    ),
)
PAGED = {"rope_append", "attention", "append_and_attend"}
OPERATIONS = {
    **{"Llama": PAGED, "gpt-oss": PAGED | {"experts"}},
    **{"DeepSeek": {"latent_attention", "experts"}, "Qwen3.5": PAGED | {"delta_net", "causal_conv"}},
}


def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter prompts, as kernels are interpreted."""
    for name, value in (("PROMPTS", (1, 18)), ("BESIDE", 2), ("ANSWER", 1)):
        monkeypatch.setattr(self_test, name, value)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.slow
@pytest.mark.parametrize("case", TINY_CHECKS[1:], ids=lambda case: case[0])
def test_kernels_of_a_generated_model_are_right(case: self_test.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OPERATIONS[case[0]]
    short_steps(monkeypatch)
    checked = self_test.check(case, CPU)
    assert not checked.faults
    by_triton = {name.partition("/")[0] for name in checked.kernels if "/triton-" in name}
    assert by_triton >= {"fused_linear"} | expected


def test_a_wrong_kernel_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    short_steps(monkeypatch)
    product = KERNELS["fused_linear"][-1].run
    with prefer_kernel("fused_linear", lambda *a: product(*a) * 1.05):
        checked = self_test.check(TINY_CHECKS[0], CPU)
    assert checked.faults and all(fault.startswith("fused_linear/") for fault in checked.faults)


def test_every_case_names_a_model_that_can_be_described() -> None:
    from localllm.arch.describe import parse_config

    for _, shape, _, _ in CHECKS:
        assert len(parse_config(shape).layers) == shape["num_hidden_layers"]


def test_rates_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "CHECKS", ())
    result = run_self_test(CPU, tiny=True)
    assert not result.left_out and result.copy > 0 and result.flops > 0
    assert [(rate.weights, rate.rows) for rate in result.products] == [(f, n) for f in PRODUCTS for n in ROWS]
    assert [(step.model, step.weights) for step in result.steps] == list(MEASURED)
    assert all(step.tokens_per_s > 0 and step.prefill_flops > 0 for step in result.steps)
    assert len(list(self_test_rows(result))) == len(PRODUCTS) + len(MEASURED) + 2


def test_what_does_not_fit_into_the_time_is_named() -> None:
    result = run_self_test(CPU, tiny=True, budget_s=-1.0)
    assert len(result.left_out) == 1 + len(CHECKS) + len(PRODUCTS) + len(MEASURED)
    assert all(part.endswith(": no time left") for part in result.left_out)


def a_test_of(device: str, tokens_per_s: float) -> SelfTest:
    step = StepRate("8B", "int4", 2048, tokens_per_s, 4.4e9 * tokens_per_s, 0.6, 4e14, "")
    return SelfTest(device, steps=[step])


def test_measured_steps_replace_the_estimate_of_plan(tmp_path: Path) -> None:
    options, gpu = LoadOptions(2048, quant="int4"), find_device("h100")
    header, settings = header_of(LLAMA_8B), Settings(tmp_path, "auto", "auto", None)

    def page() -> str:
        rates = expect_on_catalogued(header, options, gpu, settings, name="llama")
        return format_plan(plan_model(header, gpu, options, name="llama", expectation=rates))

    assert "ESTIMATED" in page()
    store(a_test_of("NVIDIA H200", 900.0), tmp_path, pytest.fail)
    assert "ESTIMATED" in page()  # of another GPU
    store(a_test_of("NVIDIA H100 80GB HBM3", 400.0), tmp_path, pytest.fail)
    store(a_test_of("NVIDIA H100 80GB HBM3", 500.0), tmp_path, pytest.fail)  # replaces the first
    found = page()
    assert "ESTIMATED" not in found and "EXPECTED" in found
    [row] = [line for line in found.splitlines() if line.startswith("decoding, 2048 tokens cached")]
    assert float(row.split()[-2]) == pytest.approx(500, rel=0.02)
    assert "expected from the self-test of the NVIDIA H100 80GB HBM3, with a" in found


def test_a_gpu_that_runs_without_graphs_is_reported() -> None:
    result = a_test_of("NVIDIA L4", 40.0)
    result.steps = [StepRate("8B", "int4", 2048, 40.0, 1.8e11, 0.6, 1e14, "LOCALLLM_GRAPHS is off")]
    assert any("without graphs: LOCALLLM_GRAPHS is off" in text for _, text in self_test_rows(result))

"""Tests a GPU for `localllm doctor --gpu-selftest`: compares the kernels that generated models call with their
references in torch, and measures products and decode steps, whose rates then replace the estimates of `plan`.

The models have the shapes of published ones and random weights, so nothing is downloaded. What does not fit into
the time or the memory is left out and named.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from localllm.arch.cost import flops
from localllm.benchmark.gpu.decode_steps import (
    Model,
    cancel_all,
    fill_prefix_cache,
    generate,
    needed_bytes,
    random_prompt,
    run_until,
    step_seconds,
    submit,
)
from localllm.benchmark.gpu.generated import (
    DEEPSEEK,
    GPT_OSS,
    QWEN3_5,
    QWEN3_MOE,
    SHAPES,
    TINY,
    Form,
    RandomSource,
)
from localllm.benchmark.gpu.kernel_check import answer_all, compared, make_sequence, run_all_kinds_of_steps
from localllm.benchmark.gpu.self_test_report import CheckedModel, ProductRate, SelfTest, StepRate
from localllm.formatting import format_bytes
from localllm.hardware.device import device_context, device_name, free_bytes, release_cached
from localllm.hardware.gpu_clock import capture, finished, seconds
from localllm.hardware.measure import measure
from localllm.plan.memory import TOKEN_BUDGET
from localllm.plan.speed import prefill_steps
from localllm.quant.vectors import KV_DTYPES
from localllm.runtime import kernels

BUDGET_S = 110.0  # after which nothing is begun, so that the test ends within two minutes
CHECKED_CONTEXT = 256  # tokens
VOCABULARY = 32_000  # of checked models
CONTEXT, TINY_CONTEXT = 2048, 40  # tokens in the cache of measured steps
STEPS, TINY_STEPS = 32, 2  # of a window
ROWS = (1, 8)  # of x, in measured products
MATRIX, TINY_MATRIX = (14_336, 4096), (64, 64)
MATRICES_BYTES = 2**30  # of different matrices, several times the size of caches
CAPTURED_SEQUENCES = 3  # of compared steps; up to 16 have the same kernels in a graph and outside
DTYPE = torch.bfloat16


def layers(shape: dict[str, Any], count: int, **changes: Any) -> dict[str, Any]:
    """Return the shape of a model with its first layers and a small vocabulary."""
    types = {"layer_types": shape["layer_types"][:count]} if "layer_types" in shape else {}
    return shape | {"num_hidden_layers": count, "vocab_size": VOCABULARY} | types | changes


# The most important ones come first, should time run out: together they call every kernel of a decode step.
Case = tuple[str, dict[str, Any], Form, str | None]  # name, shape, format of weights, dtype of keys and values
CHECKS: tuple[Case, ...] = (
    ("Llama 8B, INT4", layers(SHAPES["8B"], 1), "int4", None),
    ("Llama 1B, bf16", layers(SHAPES["1B"], 1), "bf16", None),
    ("Llama 1B, INT8, 8-bit cache", layers(SHAPES["1B"], 1), "int8", "int8"),
    ("gpt-oss, MXFP4", layers(GPT_OSS, 2, num_local_experts=8), "mxfp4", None),
    ("Qwen3 MoE, INT4, FP8 cache", layers(QWEN3_MOE, 1, num_experts=16), "int4", "fp8"),
    ("DeepSeek V2 Lite, bf16", layers(DEEPSEEK, 2, n_routed_experts=8), "bf16", None),
    ("Qwen3.5, bf16", layers(QWEN3_5, 4), "bf16", None),
)
MEASURED: tuple[tuple[str, Form], ...] = (
    ("8B", "int4"),
    ("1B", "int4"),
    ("8B", "bf16"),
    ("1B", "bf16"),
    ("8B", "int8"),
)
PRODUCTS: tuple[Form, ...] = ("int4", "bf16", "int8", "mxfp4")


@torch.inference_mode()
def run_self_test(
    device: torch.device,
    *,
    budget_s: float = BUDGET_S,
    tiny: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> SelfTest:
    """Test a GPU. tiny: test this function itself, with tiny shapes; progress: receives the name of each part"""
    result, start = SelfTest(device_name(device)), time.perf_counter()
    with device_context(device):
        for name, run in parts(result, device, tiny):
            if time.perf_counter() - start > budget_s:
                result.left_out.append(f"{name}: no time left")
                continue
            progress(name)
            try:
                run()
            except torch.OutOfMemoryError:
                result.left_out.append(f"{name}: not enough memory")
            release(device)
        finished(device)
    result.seconds = time.perf_counter() - start
    return result


def parts(result: SelfTest, device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each part of the test with the function that adds its results."""

    def ceilings() -> None:
        rates = measure(device, DTYPE)
        result.copy, result.flops = rates.copy, rates.flops

    yield "copies and products", ceilings
    for name, shape, form, kv_dtype in CHECKS:
        yield name, lambda case=(name, shape, form, kv_dtype): result.checked.append(check(case, device))
    for form in PRODUCTS:
        yield (
            f"products in {form}",
            lambda form=form: result.products.extend(measure_products(result, form, device, tiny)),
        )
    for name, form in MEASURED:
        yield f"steps of {name} in {form}", lambda case=(name, form): measure_step(result, *case, device, tiny)


def check(case: Case, device: torch.device) -> CheckedModel:
    """Compare the kernels of a model with their references, and its captured steps with others."""
    name, shape, form, kv_dtype = case
    model = generate(
        shape, form, device, CHECKED_CONTEXT, sequences=32, kv_dtype=KV_DTYPES[kv_dtype] if kv_dtype else None
    )
    engine, vocabulary = model.engine, model.config.vocab_size
    graphs, engine.runner.graphs = engine.runner.graphs, None  # replays call no kernel of the registry
    with compared() as findings:
        run_all_kinds_of_steps(engine, vocabulary, CHECKED_CONTEXT)
    faults = [*Counter(findings.wrong)]
    if not findings.ran:
        faults.append("no kernel supports its operations")
    engine.runner.graphs = graphs
    if graphs and (fault := compare_graphs(model)):
        faults.append(fault)
    return CheckedModel(name, dict(findings.ran), faults)


def compare_graphs(model: Model) -> str | None:
    """Return a fault if captured steps yield other tokens than steps launched kernel by kernel."""
    prompts = [random_prompt(model, CHECKED_CONTEXT // 4, seed) for seed in range(CAPTURED_SEQUENCES)]
    for prompt in prompts:
        fill_prefix_cache(model, prompt)
    runner = model.engine.runner
    graphs, answers = runner.graphs, []
    for used in (None, graphs):
        runner.graphs = used
        sequences = [make_sequence(p, 16, sampled=i % 2 == 1) for i, p in enumerate(prompts)]
        answers.append(answer_all(model.engine, sequences))
    return None if answers[0] == answers[1] else "captured steps and single launches yield different tokens"


def measure_products(result: SelfTest, form: Form, device: torch.device, tiny: bool) -> list[ProductRate]:
    """Measure products with different matrices in a captured graph, so that launches of the host do not count."""
    rows, columns = TINY_MATRIX if tiny else MATRIX
    source = RandomSource(form, device).under("layers.0.mlp.experts.0")  # in MXFP4, experts are packed
    first = kernels.prepare_weights(source.matrix("up_proj", rows, columns))[0]
    count = 2 if tiny else max(2, min(MATRICES_BYTES, free_bytes(device) // 4) // first.nbytes)
    others = (kernels.prepare_weights(source.matrix("up_proj", rows, columns))[0] for _ in range(count - 1))
    weights, rates = [first, *others], []
    for n in ROWS:
        x = torch.randn(n, columns, dtype=DTYPE, device=device)
        run = capture(lambda x=x: [kernels.linear(x, weight) for weight in weights], device)
        rate = count * first.nbytes / seconds(run, device, repeats=5)
        rates.append(ProductRate(form, n, rate, result.share_of_copy(rate)))
    return rates


def measure_step(result: SelfTest, name: str, form: Form, device: torch.device, tiny: bool) -> None:
    """Measure a decode step with CONTEXT tokens in the cache, and the prefill of as many."""
    shape, context = (TINY, TINY_CONTEXT) if tiny else (SHAPES[name], CONTEXT)
    if not tiny and (need := needed_bytes(shape, form, context)) > free_bytes(device):
        result.left_out.append(f"steps of {name} in {form}: they need {format_bytes(need)}")
        return
    model = generate(shape, form, device, context, sequences=2)
    prefill_s = measure_prefill(model, context, device)
    step_s, _ = step_seconds(model, context, 1, TINY_STEPS if tiny else STEPS)
    rate = model.step_bytes(context, 1) / step_s
    operations = sum(
        flops(model.config, step) * times for step, times in prefill_steps(context, TOKEN_BUDGET[device.type])
    )
    result.steps.append(
        StepRate(
            name,
            form,
            context,
            tokens_per_s=1 / step_s,
            bytes_per_s=rate,
            of_copy=result.share_of_copy(rate),
            prefill_flops=operations / prefill_s,
            without_graphs=model.engine.no_graphs_reason,
        )
    )


def measure_prefill(model: Model, context: int, device: torch.device) -> float:
    """Return the seconds of a prompt's prefill, after one that is not counted."""
    for seed in (100, 101):
        start = finished(device)
        sequence = submit(model, random_prompt(model, context, seed), 2)
        run_until(model.engine, [sequence], 1)
        duration = finished(device) - start
        cancel_all(model.engine, [sequence])
    return duration


def release(device: torch.device) -> None:
    """Release the memory of models that are no longer referenced."""
    gc.collect()
    release_cached(device)

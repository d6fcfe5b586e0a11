"""Compares simulations with figures that others have published.

    python -m bench.published

Prints a table for docs/simulate.md. Each set-up is simulated from the data sheet of its GPU with the assumptions
of `localllm simulate --device`, none of which was fitted to these figures. The engines that were measured are not
this one: an error is that of the roofline, of its assumed shares and of the difference between engines together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.parallel import Parallel, default_link
from localllm.simulate.load import Lengths, LoadPlan
from localllm.simulate.simulation import Simulated, simulate
from localllm.simulate.target import roofline_target
from tests.plan.published import LLAMA_8B, LLAMA_70B, header_of

LLAMA_2_7B = LLAMA_8B | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
LLAMA_2_70B = LLAMA_70B | {"vocab_size": 32_000, "max_position_embeddings": 4096}
USED_MEMORY = 0.9  # of a GPU's, for weights and cache
FP8_SPEEDUP = 2.0  # of arithmetic, as the data sheet of the H100 has it

TRT_1_0 = "TensorRT-LLM 1.0, docs/source/performance/perf-overview.md (commit 00f37686)"
TRT_0_6 = "TensorRT-LLM 0.6.1, docs/source/performance.md (commit 138f96d4)"
NEMO = "NeMo Framework user guide, performance of Llama 2 (docs.nvidia.com, read 2026-11-24)"


@dataclass(frozen=True)
class Published:
    """A published figure and its set-up."""

    source: str
    model: str
    config: dict[str, Any]
    device: str
    tensor: int
    fp8: bool
    concurrency: int
    requests: int
    prompt: int
    output: int
    measure: str  # tokens/s, TTFT or E2E
    value: float


def offline(
    model: str, config: dict[str, Any], tensor: int, rows: Sequence[tuple[int, int, float]]
) -> list[Published]:
    """Return the figures of requests that all arrive at once. rows: prompt, output, tokens per second"""
    return [
        Published(TRT_1_0, model, config, "h100", tensor, True, 2048, 3000, prompt, output, "tokens/s", value)
        for prompt, output, value in rows
    ]


def batch(device: str, fp8: bool, rows: Sequence[tuple[int, int, int, float]]) -> list[Published]:
    """Return the throughput of batches of Llama 2 7B. rows: batch size, prompt, output, tokens per second"""
    return [
        Published(TRT_0_6, "Llama 2 7B", LLAMA_2_7B, device, 1, fp8, size, size, prompt, output, "tokens/s", value)
        for size, prompt, output, value in rows
    ]


def first_token(
    model: str, config: dict[str, Any], device: str, tensor: int, fp8: bool, rows: Sequence[tuple[int, float]]
) -> list[Published]:
    return [
        Published(TRT_0_6, model, config, device, tensor, fp8, 1, 1, prompt, 1, "TTFT", value)
        for prompt, value in rows
    ]


def latency(device: str, rows: Sequence[tuple[int, int, float]]) -> list[Published]:
    """Return the latencies of batches of Llama 2 7B in 16 bits. rows: GPUs, batch size, milliseconds"""
    return [
        Published(NEMO, "Llama 2 7B", LLAMA_2_7B, device, ranks, False, size, size, 128, 20, "E2E", value)
        for ranks, size, value in rows
    ]


FIGURES = [
    *offline(
        "Llama 3.1 8B",
        LLAMA_8B,
        1,
        [(128, 2048, 22_714), (1000, 1000, 15_220), (2048, 128, 3450), (2048, 2048, 9305), (5000, 500, 3459)],
    ),
    *offline(
        "Llama 3.3 70B",
        LLAMA_70B,
        2,
        [(128, 2048, 6651), (1000, 1000, 4205), (2048, 128, 762), (2048, 2048, 3082)],
    ),
    *batch(
        "h100",
        True,
        [(768, 128, 128, 19_694), (112, 128, 2048, 6818), (80, 2048, 128, 2244), (48, 2048, 2048, 2740)],
    ),
    *batch("a100", False, [(384, 128, 128, 5586), (60, 128, 2048, 1928), (52, 2048, 128, 591)]),
    *first_token("Llama 2 7B", LLAMA_2_7B, "h100", 1, True, [(128, 7), (2048, 36)]),
    *first_token("Llama 2 7B", LLAMA_2_7B, "a100", 1, False, [(128, 16), (2048, 133)]),
    *first_token("Llama 2 70B", LLAMA_2_70B, "h100", 4, True, [(128, 26), (2048, 109)]),
    *first_token("Llama 2 70B", LLAMA_2_70B, "a100", 4, False, [(128, 47), (2048, 377)]),
    *latency("a100", [(1, 1, 234.0), (1, 8, 329.5), (2, 1, 171.7), (4, 1, 143.7), (8, 1, 136.5)]),
    *latency("h100", [(1, 1, 153.8), (1, 8, 199.2), (2, 1, 128.6), (4, 1, 107.4), (8, 1, 97.6)]),
]


def run(figure: Published) -> Simulated:
    device = find_device(figure.device)
    if figure.fp8:
        device = replace(device, flops=FP8_SPEEDUP * device.flops)
    parallel = Parallel(figure.tensor, 1, default_link(device))
    options = LoadOptions(None, 1, "int8" if figure.fp8 else None, "auto", "int8" if figure.fp8 else "auto")
    target = roofline_target(header_of(figure.config), device, options, name=figure.model, parallel=parallel)
    needs = target.fit.needs
    free = USED_MEMORY * device.memory_bytes * figure.tensor - needs.weights.total
    setup = replace(
        target.setup,
        blocks=int(free // needs.block_bytes),
        max_running=figure.concurrency,
        token_budget=8192,
        context=figure.prompt + figure.output,
    )
    load = LoadPlan(
        rate=1e6, requests=figure.requests, prompt=Lengths(figure.prompt), output=Lengths(figure.output)
    )
    return simulate(load, setup, target.cost)


def predicted(figure: Published) -> float:
    """Return the figure as simulated."""
    simulated = run(figure)
    if figure.measure == "tokens/s":
        return simulated.output_tokens / simulated.duration_s
    return 1e3 * max(simulated.measure(figure.measure.lower()).tolist())


def main() -> None:
    rows = [
        "| model | GPUs | requests at once | tokens in, out | figure | published | simulated | error |",
        "|---|---|---:|---|---|---:|---:|---:|",
    ]
    errors, source = list[float](), ""
    for figure in FIGURES:
        value = predicted(figure)
        error = value / figure.value - 1
        errors.append(abs(error))
        if figure.source != source:
            source = figure.source
            rows.append(f"| **{source}** | | | | | | | |")
        unit = "" if figure.measure == "tokens/s" else " ms"
        gpus = f"{figure.tensor} x {find_device(figure.device).name}, {'FP8' if figure.fp8 else '16 bits'}"
        rows.append(
            f"| {figure.model} | {gpus} | {figure.concurrency:,} | {figure.prompt}, {figure.output} "
            f"| {figure.measure} | {figure.value:,g}{unit} | {value:,.0f}{unit} | {error:+.0%} |"
        )
    errors.sort()
    print("\n".join(rows))
    print(f"\nMedian error {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}, of {len(errors)} figures.")


if __name__ == "__main__":
    main()

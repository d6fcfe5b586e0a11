"""What a model can be expected to reach on this machine: what answers like its own reached, else what is measured.

Imports torch inside functions, as `device.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, flops
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, TensorHeader
from localllm.hardware.catalog import DeviceSpec
from localllm.hardware.device import device_name, dtype_name, resolve_device, resolve_dtype
from localllm.hardware.measure import measure_this_machine, stored_rates
from localllm.metrics import Metrics
from localllm.plan import runs
from localllm.plan.fit import Fit, LoadOptions, fit_model
from localllm.plan.measured import DECODE_SHARE, measure_matmul
from localllm.plan.memory import TOKEN_BUDGET
from localllm.plan.plan import Expectation
from localllm.plan.speed import prefill_steps
from localllm.plan.weights import representative_matrix, stored_dtype
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes
from localllm.settings import Settings

if TYPE_CHECKING:
    import torch


def expect_on_device(
    header: Header,
    wish: LoadOptions,
    device: str,
    settings: Settings,
    *,
    name: str,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[DeviceSpec, Expectation | None]:
    """A device of this machine, and what it can be expected to reach with a model; None where that cannot be told:
    where the model does not fit, or in a quantization that does not run yet.

    Raises NoSuchDevice and UsageError, and as `describe`. `note` is told which file cannot be used.
    """
    from localllm.runtime.kernels.threads import threads_for

    place = resolve_device(settings.device if device == "auto" else device)
    kind = resolve_dtype(wish.dtype, stored_dtype(header, place.type), place)
    hardware = measure_this_machine(str(place), dtype_name(kind), settings, note=note)
    config = parse_config(header.config)
    found = fit_model(header, config, hardware, wish, name=name)
    if wish.quant or not found.fits:
        return hardware, None
    threads = threads_for(found.weights.total, settings.threads)
    read = bytes_read(
        config, found.weights, (SequenceStep(1, found.context),), kind.itemsize, kv_element_bytes(found.kv_dtype)
    )
    like = run_setup(name, header, kind, place, threads, read)
    reached = expected_rates(header, config, like, kind, place, settings.home, note)
    # What was reached can be reached: the machine's rates may have been measured while it was busy.
    bandwidth, rate = max(hardware.bandwidth, reached.bandwidth), max(hardware.flops, reached.flops)
    return replace(hardware, bandwidth=bandwidth, flops=rate), reached


def known_tokens_per_s(
    header: Header, found: Fit, device: torch.device, settings: Settings, *, name: str
) -> float | None:
    """About how many tokens a second one user would get while the cache is empty, by what is kept of this machine:
    answers of models like it, else its rates. None where neither is known. Measures nothing.
    """
    from localllm.runtime.kernels.threads import threads_for

    config = parse_config(header.config)
    kind = resolve_dtype(found.dtype, stored_dtype(header, device.type), device)
    alone, kv = (SequenceStep(1, 1),), kv_element_bytes(found.kv_dtype)
    read = bytes_read(config, found.weights, alone, kind.itemsize, kv)
    threads = threads_for(found.weights.total, settings.threads)
    known = None
    if found.quant is None:
        like = run_setup(name, header, kind, device, threads, read)
        known = runs.median_rates(runs.read(settings.home / "runs.jsonl", lambda text: None), like)
    if known:
        return known.bandwidth / read
    rates = stored_rates(device, kind, settings)
    return DECODE_SHARE * rates.read / read if rates else None


def expected_rates(
    header: Header,
    config: ModelConfig,
    like: runs.Run,
    dtype: torch.dtype,
    device: torch.device,
    home: Path,
    note: Callable[[str], None],
) -> Expectation:
    """From this machine's answers where there are any like it, else from a measurement. like: what a run of the
    model would be recorded as."""
    known = runs.median_rates(runs.read(home / "runs.jsonl", note), like)
    if known and known.flops_per_s:
        return Expectation(known.bandwidth, known.flops_per_s, 0.0, f"{known.answers} of this machine")
    measured = measure_matmul(representative_matrix(header), dtype, device, like.threads)
    if known:
        return Expectation(known.bandwidth, measured.flops, 0.0, f"{known.answers} of this machine")
    source = "products with matrices of this model's format and size"
    return Expectation(measured.bandwidth, measured.flops, measured.layer_s * len(config.layers), source)


def run_setup(
    name: str, header: Header, dtype: torch.dtype, device: torch.device, threads: int, bytes_per_token: float
) -> runs.Run:
    """A run of the model before it has been run: what others are compared with."""
    matrix = representative_matrix(header)
    form = matrix.dtype if isinstance(matrix, TensorHeader) else matrix.format.upper()
    return runs.Run(name, device_name(device), dtype_name(dtype), form, threads, 0, bytes_per_token, 1.0, None)


def measured_run(
    before: runs.Run, config: ModelConfig, weights: WeightBytes, kv_dtype: str, metrics: Metrics
) -> runs.Run | None:
    """What an answer reached, of a model that had been set up; None where it was too short to tell, or drafts
    changed what a step brings."""
    if metrics.output_tokens < runs.MIN_OUTPUT_TOKENS or metrics.draft_tokens:
        return None
    context, element = metrics.prompt_tokens + metrics.output_tokens, ELEMENT_BYTES[before.dtype]
    on_average = (SequenceStep(1, context - metrics.output_tokens // 2),)
    rate = None
    if metrics.prompt_tokens >= runs.MIN_PROMPT_TOKENS and not metrics.cached_tokens:
        steps = prefill_steps(metrics.prompt_tokens, TOKEN_BUDGET["cpu"])  # which hardly changes their operations
        rate = sum(flops(config, step) * times for step, times in steps) / metrics.prefill_s
    return replace(
        before,
        context=context,
        bytes_per_token=bytes_read(config, weights, on_average, element, kv_element_bytes(kv_dtype)),
        tokens_per_s=metrics.tokens_per_s,
        flops_per_s=rate,
    )

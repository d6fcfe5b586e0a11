"""The rates that a model is expected to reach on this machine: from earlier comparable answers, or from
measurements.

Imports torch inside functions, like `device.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, flops
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, TensorHeader
from localllm.errors import UsageError
from localllm.hardware.catalog import DeviceSpec, find_device
from localllm.hardware.device import device_name, dtype_name, machine_bytes, resolve_device, resolve_dtype
from localllm.hardware.measure import measure_this_machine, stored_rates
from localllm.metrics import Metrics
from localllm.plan import runs
from localllm.plan.fit import Fit, FreeMemory, LoadOptions, fit_model, model_needs
from localllm.plan.measured import DECODE_SHARE, measure_matmul
from localllm.plan.memory import TOKEN_BUDGET
from localllm.plan.plan import Expectation
from localllm.plan.speed import prefill_steps
from localllm.plan.step_times import StepSetup
from localllm.plan.weights import representative_matrix, stored_dtype
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes
from localllm.settings import Settings

if TYPE_CHECKING:
    import torch


# Bytes of weights per second that a processor whose rate was never measured reads: a third of the peak of two
# channels of DDR4-2666. A GPU reads all that it holds many times a second.
ASSUMED_BANDWIDTH = {"cpu": 14e9, "cuda": math.inf}


def measured_bandwidth(device: torch.device, dtype: str, settings: Settings) -> float | None:
    """Return the bytes of unpacked weights per second that decoding reads, if this machine was measured.

    dtype: a name, or `auto`
    """
    rates = stored_rates(device, resolve_dtype(dtype, "BF16", device), settings)
    return DECODE_SHARE * rates.read if rates else None


def memory_of(device: torch.device, memory_bytes: int, settings: Settings) -> FreeMemory:
    """Return the memory with the bandwidth of the device, if that was measured."""
    bandwidth = measured_bandwidth(device, settings.dtype, settings)
    return FreeMemory(device.type, memory_bytes, bandwidth, find_machine_bytes=lambda: machine_bytes(device))


def expect_on_device(
    header: Header,
    options: LoadOptions,
    device: str,
    settings: Settings,
    *,
    name: str,
    note: Callable[[str], None] = lambda text: None,
    by_answers: bool = True,
    hardware: DeviceSpec | None = None,
) -> tuple[DeviceSpec, Expectation | None]:
    """Return a device of this machine, and the rates that a model is expected to reach on it.

    by_answers: use the rates of earlier answers, which include the overheads of steps with a single sequence.
    hardware: the device, if it was measured before; None: its rates are measured unless they are stored.

    The latter are None if the model does not fit, or is not quantized yet. Raises NoSuchDevice and UsageError, and
    like `parse_config`. note: receives a line for each file that cannot be used.
    """
    from localllm.runtime.kernels.threads import threads_for

    target = resolve_device(settings.device if device == "auto" else device)
    torch_dtype = resolve_dtype(options.dtype, stored_dtype(header, target.type), target)
    hardware = hardware or measure_this_machine(str(target), dtype_name(torch_dtype), settings, note=note)
    config = parse_config(header.config)
    fit = fit_model(header, config, hardware, options, name=name)
    if not fit.fits:
        return hardware, None
    if options.quant:
        return hardware, expect_from_self_test(header, fit, hardware.name, settings, name=name, note=note)
    threads = threads_for(fit.weights.total, settings.threads)
    read = bytes_read(
        config, fit.weights, (SequenceStep(1, fit.context),), torch_dtype.itemsize, kv_element_bytes(fit.kv_dtype)
    )
    setup = run_setup(name, header, torch_dtype, target, threads, read)
    expectation = expected_rates(
        header, config, setup, torch_dtype, target, settings.home, note, by_answers=by_answers
    )
    # Rates that answers reached are reachable: the machine's own may have been measured while it was busy.
    bandwidth, rate = max(hardware.bandwidth, expectation.bandwidth), max(hardware.flops, expectation.flops)
    return replace(hardware, bandwidth=bandwidth, flops=rate), expectation


def expect_on_catalogued(
    header: Header,
    options: LoadOptions,
    gpu: DeviceSpec,
    settings: Settings,
    *,
    name: str,
    note: Callable[[str], None] = lambda text: None,
) -> Expectation | None:
    """Return the rates of the self-test of a GPU of the catalogue; None if this machine has tested no such GPU."""
    tested = {run.device for run in runs.read(settings.home / runs.SELF_TEST_FILE, note)}
    device = next((each for each in sorted(tested) if catalogue_name(each) == gpu.name), None)
    fit = fit_model(header, parse_config(header.config), gpu, options, name=name)
    if device is None or not fit.fits:
        return None
    return expect_from_self_test(header, fit, device, settings, name=name, note=note)


def catalogue_name(device: str) -> str | None:
    """Return the name in the catalogue of a device as its driver reports it."""
    try:
        return find_device(device).name
    except UsageError:
        return None


def expect_from_self_test(
    header: Header, fit: Fit, device: str, settings: Settings, *, name: str, note: Callable[[str], None]
) -> Expectation | None:
    """Return the rates of a GPU's self-test with weights in this format; None without any.

    device: as reported by its driver
    """
    config, step = parse_config(header.config), (SequenceStep(1, fit.context),)
    read = bytes_read(config, fit.weights, step, ELEMENT_BYTES[fit.dtype], kv_element_bytes(fit.kv_dtype))
    form = fit.quant.upper() if fit.quant else weight_form(header)
    setup = runs.Run(name, device, fit.dtype, form, 0, 0, read, 1.0, None)
    run = runs.nearest_self_test(settings.home / runs.SELF_TEST_FILE, setup, note)
    return expectation_of(run) if run else None


def expectation_of(run: runs.Run) -> Expectation | None:
    """Return the rates of a run of the self-test."""
    if run.flops_per_s is None:
        return None
    source = f"the self-test of the {run.device}, with a generated {run.model} in {run.form}"
    return Expectation(run.bandwidth, run.flops_per_s, 0.0, source)


def weight_form(header: Header) -> str:
    """Return the most frequent weight format, as in `Run.form`."""
    matrix = representative_matrix(header)
    return matrix.dtype if isinstance(matrix, TensorHeader) else matrix.format.upper()


def known_tokens_per_s(
    header: Header, fit: Fit, device: torch.device, settings: Settings, *, name: str
) -> float | None:
    """Return the approximate tokens per second for one user with an empty cache, from stored data; None if
    unknown.

    Uses the rates of comparable answers, or this machine's. Measures nothing.
    """
    from localllm.runtime.kernels.threads import threads_for

    config = parse_config(header.config)
    torch_dtype = resolve_dtype(fit.dtype, stored_dtype(header, device.type), device)
    single_step, kv = (SequenceStep(1, 1),), kv_element_bytes(fit.kv_dtype)
    read = bytes_read(config, fit.weights, single_step, torch_dtype.itemsize, kv)
    threads = threads_for(fit.weights.total, settings.threads)
    rates = None
    if fit.quant is None:
        setup = run_setup(name, header, torch_dtype, device, threads, read)
        rates = runs.median_rates(runs.read(settings.home / "runs.jsonl", lambda text: None), setup)
    if rates:
        return rates.bandwidth / read
    machine_rates = stored_rates(device, torch_dtype, settings)
    return DECODE_SHARE * machine_rates.read / read if machine_rates else None


def step_setup(
    header: Header, options: LoadOptions, device: str, settings: Settings, *, name: str
) -> tuple[StepSetup, str]:
    """Return what the durations of a model's steps on this machine are recorded under, and the device's name.

    Raises NoSuchDevice and UsageError, and like `parse_config`.
    """
    from localllm.runtime.kernels.threads import threads_for

    target = resolve_device(settings.device if device == "auto" else device)
    config = parse_config(header.config)
    needs = model_needs(header, config, target.type, options, name=name)
    threads = threads_for(needs.weights.total, settings.threads)
    shown = device_name(target)
    model = f"{name} in {options.quant.upper()}" if options.quant else name  # as `--quant` names what it makes
    return StepSetup(model, shown, needs.dtype, needs.kv_dtype, threads), shown


def expected_rates(
    header: Header,
    config: ModelConfig,
    setup: runs.Run,
    dtype: torch.dtype,
    device: torch.device,
    home: Path,
    note: Callable[[str], None],
    *,
    by_answers: bool = True,
) -> Expectation:
    """Return the rates of comparable answers on this machine, of a GPU's self-test, or measured ones.

    setup: what a run of the model would be recorded as; by_answers: as in `expect_on_device`
    """
    rates = runs.median_rates(runs.read(home / "runs.jsonl", note), setup) if by_answers else None
    if rates and rates.flops_per_s:
        return Expectation(rates.bandwidth, rates.flops_per_s, 0.0, f"{rates.answers} of this machine")
    tested = runs.nearest_self_test(home / runs.SELF_TEST_FILE, setup, note) if device.type == "cuda" else None
    if not rates and tested and (expectation := expectation_of(tested)):
        return expectation
    measured = measure_matmul(representative_matrix(header), dtype, device, setup.threads)
    if rates:
        return Expectation(rates.bandwidth, measured.flops, 0.0, f"{rates.answers} of this machine")
    source = "matrix products in this model's format and size"
    return Expectation(measured.bandwidth, measured.flops, measured.layer_s * len(config.layers), source)


def run_setup(
    name: str, header: Header, dtype: torch.dtype, device: torch.device, threads: int, bytes_per_token: float
) -> runs.Run:
    """Return a Run of the model without results, for finding comparable ones."""
    form = weight_form(header)
    return runs.Run(name, device_name(device), dtype_name(dtype), form, threads, 0, bytes_per_token, 1.0, None)


def measured_run(
    setup: runs.Run, config: ModelConfig, weights: WeightBytes, kv_dtype: str, metrics: Metrics
) -> runs.Run | None:
    """Return a Run with the results of an answer.

    Returns None if it was too short to be meaningful, or drafts changed the number of tokens per step.
    """
    if metrics.output_tokens < runs.MIN_OUTPUT_TOKENS or metrics.draft_tokens:
        return None
    context, element = metrics.prompt_tokens + metrics.output_tokens, ELEMENT_BYTES[setup.dtype]
    mean_step = (SequenceStep(1, context - metrics.output_tokens // 2),)
    rate = None
    if metrics.prompt_tokens >= runs.MIN_PROMPT_TOKENS and not metrics.cached_tokens:
        # The exact budget hardly affects the number of operations.
        steps = prefill_steps(metrics.prompt_tokens, TOKEN_BUDGET["cpu"])
        rate = sum(flops(config, step) * times for step, times in steps) / metrics.prefill_s
    return replace(
        setup,
        context=context,
        bytes_per_token=bytes_read(config, weights, mean_step, element, kv_element_bytes(kv_dtype)),
        tokens_per_s=metrics.tokens_per_s,
        flops_per_s=rate,
    )

"""Products with a loaded model's own weights: kernel, instructions and rate by shape (`bench --explain`)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.hardware import measure, processor
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.kernels.threads import use_threads
from localllm.runtime.layers.linear import Linear

PREFILL_ROWS = 512
INTEGER_KERNEL = "cpu-interleaved"  # whose instructions depend on the processor

Weight = Tensor | QuantizedTensor


@dataclass(frozen=True)
class ProductRate:
    """Products with all matrices of one format and shape, as they are stacked in memory. Experts are left out."""

    format: str
    rows: int
    columns: int
    matrices: int
    nbytes: int  # of all matrices
    decode_kernel: str  # for one row of x
    prefill_kernel: str  # for PREFILL_ROWS rows
    instructions: str | None  # for products of bytes; None: the kernel uses none
    bytes_per_s: float  # of weights, with one row of x
    of_memory: float  # share of memory bandwidth; more than 1 where caches hold all matrices


def measure_products(
    model: object, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[ProductRate, ...]:
    """Measure all shapes of a loaded model, largest first. threads: that the model uses."""
    groups: dict[tuple[str, torch.Size], list[Weight]] = {}
    for linear in find_linears(model, set()):
        for weight in linear.weights:
            groups.setdefault((weight_format(weight), torch.Size(weight.shape)), []).append(weight)
    with use_threads(threads), torch.inference_mode():
        memory = measure.measure(device, dtype)
        bandwidth = max(memory.copy, memory.read)
        rates = [measure_shape(weights, dtype, device, bandwidth) for weights in groups.values()]
    return tuple(sorted(rates, key=lambda rate: -rate.nbytes))


def find_linears(part: object, seen: set[int]) -> Iterator[Linear]:
    """Find the matrices in the parts of a model, each once."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from find_linears(each, seen)
    elif isinstance(part, dict):
        for each in part.values():
            yield from find_linears(each, seen)
    elif type(part).__module__.startswith("localllm.runtime.") and hasattr(part, "__dict__"):
        for each in vars(part).values():
            yield from find_linears(each, seen)


def weight_format(weight: Weight) -> str:
    return weight.format if isinstance(weight, QuantizedTensor) else str(weight.dtype).removeprefix("torch.")


def measure_shape(
    weights: list[Weight], dtype: torch.dtype, device: torch.device, bandwidth: float
) -> ProductRate:
    """weights: of one format and shape; bandwidth: of memory, in bytes/s."""
    first = weights[0]
    rows, columns = first.shape
    x = torch.rand(PREFILL_ROWS, columns, device=device).to(dtype)
    seconds = measure.median_seconds(
        measure.device_clock(device), lambda: [kernels.linear(x[:1], weight) for weight in weights]
    )
    decode, prefill = (chosen_kernel(each, first) for each in (x[:1], x))
    nbytes = sum(weight.nbytes for weight in weights)
    return ProductRate(
        format=weight_format(first),
        rows=rows,
        columns=columns,
        matrices=len(weights),
        nbytes=nbytes,
        decode_kernel=decode,
        prefill_kernel=prefill,
        instructions=processor.used_instructions() if INTEGER_KERNEL in (decode, prefill) else None,
        bytes_per_s=nbytes / seconds,
        of_memory=nbytes / seconds / bandwidth,
    )


def chosen_kernel(x: Tensor, weight: Weight) -> str:
    operation = "plain_linear" if isinstance(weight, Tensor) else "linear"
    return next(name for name, reason in kernels.explain(operation, x, weight, None) if reason == "ok")

"""Estimates decoding on a GPU that was never measured, from what its kernels read and execute.

A launch reads its bytes at most at BANDWIDTH_SHARE of the published bandwidth, and executes the instructions that
were counted in its machine code. The fastest estimate lets both overlap completely, the slowest not at all. The
counts are in `gpu_costs.json`, written by `python tools/step_estimate.py`; docs/kernels.md states the assumptions.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.arch.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, expert_fraction_read, kv_bytes_read
from localllm.checkpoint.header import Header
from localllm.checkpoint.matrices import find_packed_matrix
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.fit import Fit
from localllm.plan.weights import GGUF_PLAIN, is_multiplied, use_of
from localllm.quant.packing import (
    ELEMENT_BYTES,
    FP8,
    GGUF_GPU_PACKED,
    INT4,
    INT8,
    MXFP4,
    W8A8,
    kv_element_bytes,
)

# Architectures that kernels are not compiled for, and those whose counts are used.
SIMILAR_ARCHS = {86: 89, 87: 80, 103: 100, 121: 120}
DENSE, CACHE = "bf16", "cache"
EXPERTS = "experts in "  # prefix of formats
# Formats of what `--quant` makes, and of published GGUF files, by the use of a matrix.
QUANT_FORMATS = {
    "int8": {"layers": INT8, "experts": INT8, "head": INT8},
    "int4": {"layers": INT4, "experts": INT4, "head": INT8},
    "q8_0": {"layers": INT8, "experts": INT8, "head": INT8},
    "q4_k_m": {"layers": "q4_k", "experts": "q4_k", "head": "q6_k"},
}


@dataclass(frozen=True)
class EstimatedRate:
    """Decoded tokens per second of a single user."""

    fastest: float  # reading and computing overlap completely
    slowest: float  # they do not overlap


@dataclass(frozen=True)
class Estimate:
    """Decoding on a GPU that was never measured."""

    first_tokens_per_s: EstimatedRate  # with an empty cache
    tokens_per_s: EstimatedRate  # at full context
    source: str


@dataclass(frozen=True)
class GpuCosts:
    """Costs of the kernels on GPUs of one architecture."""

    bandwidth_share: float  # of the published bandwidth that reads reach
    node_s: float  # seconds that a launch takes besides its work
    # Cycles of a multiprocessor per byte of weights, by format, and per byte of cached keys and values.
    cycles: Mapping[str, float]
    nodes: Mapping[str, int]  # launches of a layer, by the type of its MLP, and of a step besides its layers


def estimate_decoding(header: Header, config: ModelConfig, fit: Fit, gpu: DeviceSpec) -> Estimate | None:
    """Return the estimate for one user; None for a device or layers whose kernels were not counted."""
    costs = gpu.cores and gpu_costs(gpu.cores.arch)
    if gpu.cores is None or costs is None:
        return None
    nodes = step_nodes(config, costs)
    formats = formats_by_use(header, config, fit.quant)
    if nodes is None or not set(formats.values()) <= {name.removeprefix(EXPERTS) for name in costs.cycles}:
        return None
    first, full = (
        estimated_rate(config, fit, gpu, costs, formats, nodes, context) for context in (1, fit.context)
    )
    arch = gpu.cores.arch
    counted = f"sm_{arch}" if arch not in SIMILAR_ARCHS else f"sm_{SIMILAR_ARCHS[arch]}, as for sm_{arch}"
    return Estimate(first, full, f"the bytes and instructions of its kernels for {counted}, not measured")


def estimated_rate(
    config: ModelConfig,
    fit: Fit,
    gpu: DeviceSpec,
    costs: GpuCosts,
    formats: Mapping[str, str],
    nodes: int,
    context: int,
) -> EstimatedRate:
    """formats: of weights, by use; nodes: launches of the step"""
    assert gpu.cores
    step, element, kv = (SequenceStep(1, context),), ELEMENT_BYTES[fit.dtype], kv_element_bytes(fit.kv_dtype)
    read_s = bytes_read(config, fit.weights, step, element, kv) / (gpu.bandwidth * costs.bandwidth_share)
    cycles = costs.cycles[CACHE] * kv_bytes_read(config, step, *kv)
    cycles += weight_cycles(config, fit.weights, formats, costs)
    compute_s = cycles / (gpu.cores.multiprocessors * gpu.cores.clock_hz)
    nodes_s = nodes * costs.node_s
    return EstimatedRate(1 / (max(read_s, compute_s) + nodes_s), 1 / (read_s + compute_s + nodes_s))


def weight_cycles(config: ModelConfig, weights: WeightBytes, formats: Mapping[str, str], costs: GpuCosts) -> float:
    """Return the cycles of all multiprocessors together that the weights of a step with one token take."""
    experts = weights.experts * expert_fraction_read(config, 1)
    sizes = {"layers": weights.layers, "experts": experts, "head": weights.head}
    total = 0.0
    for use, form in formats.items():
        stacked = costs.cycles.get(EXPERTS + form) if use == "experts" else None
        total += sizes[use] * (costs.cycles[form] if stacked is None else stacked)
    return total


def step_nodes(config: ModelConfig, costs: GpuCosts) -> int | None:
    """Return the launches of a step with one token; None if a type of layer was not counted."""
    if config.encoder or config.per_layer:
        return None
    kinds = [layer_kind(layer) for layer in config.layers]
    if None in kinds:
        return None
    return costs.nodes["step"] + sum(costs.nodes[kind] for kind in kinds if kind)


def layer_kind(layer: LayerConfig) -> str | None:
    if not isinstance(layer.mixer, AttentionConfig):
        return None
    return "mlp" if isinstance(layer.ffn, MLPConfig) else "moe"


def formats_by_use(header: Header, config: ModelConfig, quant: str | None) -> dict[str, str]:
    """Return the format of the largest matrix of each use on a GPU, by field of WeightBytes."""
    formats, sizes = dict[str, str](), dict[str, int]()
    for name, tensor in header.tensors.items():
        use = use_of(name, config.tie_embeddings)
        multiplied = use == "experts" or is_multiplied(name, tensor, config) or len(tensor.shape) == 3
        packed = find_packed_matrix(header, name.rpartition(".")[0])
        if use == "tables" or not (multiplied or packed) or tensor.elements <= sizes.get(use, 0):
            continue
        sizes[use] = tensor.elements
        if packed:
            formats[use] = INT8 if packed.format == W8A8 else packed.format
        elif tensor.dtype == "U8":
            formats[use] = MXFP4
        elif tensor.offset is not None and tensor.dtype.lower() not in GGUF_PLAIN:
            formats[use] = gguf_format(tensor.dtype.lower())
        else:
            formats[use] = FP8 if tensor.dtype.startswith("F8") else DENSE
    return {use: QUANT_FORMATS[quant][use] for use in formats} if quant else formats


def gguf_format(block_format: str) -> str:
    """Return the format with counted instructions that is unpacked like a block format; that one without any."""
    bits = GGUF_GPU_PACKED.get(block_format, (0,))[0]
    return {4: "q4_k", 8: "q6_k"}.get(bits, block_format)


def gpu_costs(arch: int) -> GpuCosts | None:
    """Return the costs of an architecture; None if kernels were compiled neither for it nor for a similar one."""
    content = _costs_file()
    cycles = content["cycles"].get(str(SIMILAR_ARCHS.get(arch, arch)))
    if cycles is None:
        return None
    return GpuCosts(content["bandwidth_share"], content["node_s"], cycles, content["nodes"])


@functools.cache
def _costs_file() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("gpu_costs.json").read_text(encoding="utf-8"))

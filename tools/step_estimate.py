"""Estimates the time of a decode step on GPUs that need not be here. None of it is a measurement.

`python tools/step_estimate.py` writes the tables of docs/kernels.md and localllm/plan/gpu_costs.json, with which
`localllm plan` estimates other models; `--costs` writes the latter alone. `step_estimate.py MODEL GPU`, named as
in the tables, prints those of one pair.

The launches are recorded from the model itself, with tensors on device `meta`, compiled for the GPU, and
disassembled. A launch reads its bytes, at the bandwidth or with the loads that are in flight, and executes its
instructions, as counted in the machine code, in the time of the busiest pipe or of issuing them. It takes as long
as the slower of the two if they overlap, as long as both if they do not, and NODE_S in addition.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.arch.config import AttentionConfig, ModelConfig  # noqa: E402
from localllm.arch.describe import parse_config  # noqa: E402
from localllm.benchmark.gpu.generated import GPT_OSS, QWEN3_MOE, SHAPES, RandomSource  # noqa: E402
from localllm.hardware.catalog import DeviceSpec, find_device  # noqa: E402
from localllm.plan.estimated import CACHE, DENSE, EXPERTS  # noqa: E402
from localllm.plan.memory import BLOCK_SIZE  # noqa: E402
from localllm.quant.tensor import QuantizedTensor  # noqa: E402
from localllm.runtime import kernels  # noqa: E402
from localllm.runtime.batch import Batch  # noqa: E402
from localllm.runtime.kernels.gpu import register  # noqa: E402, F401 (registers the kernels)
from localllm.runtime.kernels.gpu.decode import attention_example  # noqa: E402
from localllm.runtime.kernels.gpu.launch import (  # noqa: E402
    BITS,
    GPUS,
    Gpu,
    RecordedLaunch,
    meta_packed_weight,
    meta_tensor,
    record_launches,
)
from localllm.runtime.kernels.gpu.small_m import ticket_counters  # noqa: E402
from localllm.runtime.kernels.gpu.small_m_packed import PREFETCH_WORDS  # noqa: E402
from localllm.runtime.kv_cache.tensors import make_caches  # noqa: E402
from localllm.runtime.model import Decoder  # noqa: E402
from tools.triton_aot import CUOBJDUMP, WARP_THREADS, CompiledTriton, compilation_key, compile_for  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
COSTS = ROOT / "localllm" / "plan" / "gpu_costs.json"
MARKS = ("<!-- estimates -->\n", "<!-- end of estimates -->")
META = torch.device("meta")
CONTEXT = 2048  # tokens in the cache

# Assumptions.
NODE_S = 1.0e-6  # a kernel's start and end beside its neighbours', inside a graph
LATENCY_S = 0.74e-6  # of a load from memory while the bandwidth is used
BANDWIDTH_SHARE = 0.92  # of the published bandwidth that reads reach
SHARED_PER_SM = {80: 164 * 2**10, 89: 100 * 2**10, 90: 228 * 2**10, 100: 228 * 2**10, 120: 100 * 2**10}
REGISTERS_PER_SM = 65_536
MAX_PROGRAMS = 24  # resident on a multiprocessor, as far as registers and shared memory allow

# GPUs: name in the catalogue, architecture, multiprocessors (whitepapers of the architectures).
DEVICES = (
    ("A100 SXM 80GB", 80, 108),
    ("RTX 4090", 89, 128),
    ("RTX 5090", 120, 170),
    ("H100 SXM", 90, 132),
    ("H200", 90, 132),
    ("B200", 100, 148),
)
# Operations of dense 16-bit products per cycle and multiprocessor: the catalogue's rate implies the clock.
PRODUCT_FLOPS = {80: 2048, 89: 512, 90: 4096, 100: 8192, 120: 512}
# Cycles that a warp's instruction occupies a pipe of its quarter of a multiprocessor (CUDA C++ Programming Guide,
# table of arithmetic throughput); tensor: of a mma.sync m16n8k16.
PIPE_CYCLES = {
    80: {"alu": 2, "fma": 2, "half": 2, "tensor": 8, "special": 8, "load": 4},
    89: {"alu": 2, "fma": 1, "half": 2, "tensor": 32, "special": 8, "load": 4},
    90: {"alu": 2, "fma": 1, "half": 1, "tensor": 6.5, "special": 8, "load": 4},
    100: {"alu": 1, "fma": 1, "half": 1, "tensor": 8, "special": 8, "load": 4},
    120: {"alu": 1, "fma": 1, "half": 2, "tensor": 32, "special": 8, "load": 4},
}
PIPES = (  # the first whose pattern a mnemonic begins with
    ("tensor", r"HMMA|IMMA|HGMMA|QMMA|WGMMA"),
    ("half", r"HADD2|HMUL2|HFMA2"),
    ("fma", r"FFMA|FADD|FMUL|IMAD"),
    ("special", r"MUFU|I2F|F2F|F2I|POPC"),
    ("load", r"LD|ST|ATOM|RED|SHFL|CCTL"),
    ("uniform", r"U[A-Z]|R2UR|S2UR|BAR|BRA|EXIT|NOP|WARPSYNC|DEPBAR|LDGDEPBAR|ERRBAR|MEMBAR"),
    ("alu", r""),
)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)")


@dataclass(frozen=True)
class EstimatedModel:
    name: str
    config: dict[str, Any]
    weight_format: Callable[[str], str | None]  # by the name of a matrix; None: bfloat16


class MetaSource(RandomSource):
    """Weights without memory, as they are laid out on a GPU."""

    def __init__(self, weight_format: Callable[[str], str | None], prefix: str = ""):
        super().__init__("int4", META, prefix=prefix)
        self.weight_format = weight_format

    def under(self, name: str) -> "MetaSource":
        return MetaSource(self.weight_format, f"{self.prefix}{name}.")

    def matrix(self, name: str, rows: int, columns: int, *, checked: bool = True) -> Tensor | QuantizedTensor:
        kind = self.weight_format(self.prefix + name)
        if kind is None:
            return self.tensor(name, rows, columns)
        return meta_packed_weight(kind, rows, columns, {"int4": 128, "mxfp4": 32}.get(kind))


def quantized_layers(name: str) -> str | None:
    """INT4 layers and an INT8 head, as `--quant int4` makes them."""
    if name == "embed_tokens" or "router" in name:
        return None
    return "int8" if name == "lm_head" else "int4"


def experts_only(name: str) -> str | None:
    """gpt-oss as published: MXFP4 experts, everything else in bfloat16."""
    return "mxfp4" if ".experts." in name else None


DETAILED = "Llama 3.1 8B, INT4"
SHOWN_S = 1.5e-6
MODELS = (
    EstimatedModel("Llama 3.2 1B, INT4", SHAPES["1B"] | {"tie_word_embeddings": False}, quantized_layers),
    EstimatedModel(DETAILED, SHAPES["8B"], quantized_layers),
    EstimatedModel("gpt-oss 20B, MXFP4", GPT_OSS, experts_only),
    EstimatedModel("Qwen3 30B-A3B, INT4", QWEN3_MOE, quantized_layers),
    EstimatedModel("Llama 3.1 70B, INT4", SHAPES["70B"], quantized_layers),
)
# Of `plan`: layers whose launches are counted, formats of weights, and those of experts.
LAYERS = {"mlp": SHAPES["8B"], "moe": QWEN3_MOE}
FORMATS = (DENSE, *BITS)
EXPERT_FORMATS = ("int4", "mxfp4")
WEIGHT_ARGUMENTS = ("p_w", "p_q", "p_scale", "p_zero", "p_minimum", "p_block_scale", "p_block_minimum")


@dataclass(frozen=True)
class RecordedStep:
    launches: list[RecordedLaunch]
    torch_kernels: int  # of operations that have no kernel here

    @property
    def nodes(self) -> int:
        return len(self.launches) + self.torch_kernels


class KernelCounter(TorchDispatchMode):
    """Counts torch's operations that would launch a kernel."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not func.is_view and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


def record_step(model: EstimatedModel, gpu: Gpu) -> RecordedStep:
    """Record a step of one sequence, with one token and CONTEXT tokens in the cache, without sampling."""
    config: ModelConfig = parse_config(model.config)
    blocks = CONTEXT // BLOCK_SIZE
    with record_launches(gpu) as launches, torch.inference_mode():
        decoder = Decoder(config, MetaSource(model.weight_format), CONTEXT)
        mixers = [layer.mixer for layer in config.layers]
        caches = make_caches(mixers, blocks, BLOCK_SIZE, 1, torch.bfloat16, META)
        decoder(single_token_batch(blocks), caches)  # allocates what later steps reuse
        launches.clear()
        ticket_counters(META)  # made once, not in every step
        with KernelCounter() as counter:
            decoder(single_token_batch(blocks), caches)
    return RecordedStep(launches, counter.count)


def single_token_batch(blocks: int) -> Batch:
    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    return Batch(
        token_ids=integers(1),
        positions=integers(1),
        query_start=integers(2, dtype=torch.int32),
        context_len=integers(1, dtype=torch.int32),
        block_table=integers(1, blocks, dtype=torch.int32),
        slot_mapping=integers(1),
        logit_index=integers(1),
        block_size=BLOCK_SIZE,
        max_query_len=1,
        uniform_query_len=1,
    )


@dataclass(frozen=True)
class Work:
    """What a launch does, in all of its programs."""

    programs: int  # that find work
    trips: int  # of a program's main loop
    nbytes: int  # read from memory
    weights: int  # multiplied; 0: no product


def work_of(launch: RecordedLaunch, context: int) -> Work:
    a, programs = launch.arguments, prod(launch.grid)
    name = launch.kernel.__name__
    if name in ("decode_kernel", "rope_decode_kernel"):
        tokens = min(context, a["WINDOW"] or context)
        tiles = ceil(tokens / a["TILE"])
        used = min(tiles, a["SPLITS"])
        nbytes = 2 * tokens * a["KV_HEADS"] * a["DIM"] * a["p_k"].element_size()
        return Work(programs // a["SPLITS"] * used, ceil(tiles / used), nbytes, 0)
    tensors = [a[key] for key in WEIGHT_ARGUMENTS if isinstance(a.get(key), Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if name == "grouped_matmul_kernel":
        share = min(1.0, a["p_chosen"].numel() / a["experts"])
        rows = a["rows_each"] * a["experts"]
        return Work(programs, a["chunks"] // a["UNROLLED"], int(nbytes * share), int(rows * a["K"] * share))
    if name in ("small_m_packed_kernel", "small_m_dense_kernel"):
        return Work(programs, a["share"], nbytes, a["N"] * a["K"])
    if name == "quantized_gemm_kernel":
        return Work(programs, a["chunks_a_part"], nbytes, a["N"] * a["K"])
    return Work(programs, 1, 0, 0)


@dataclass(frozen=True)
class MachineCode:
    """Instructions by pipe that a warp executes once, and in one trip of the main loop."""

    once: Counter[str]
    trip: Counter[str]
    barriers: int  # of a trip

    def executed(self, trips: int) -> Counter[str]:
        return self.once + Counter({pipe: count * trips for pipe, count in self.trip.items()})


def read_machine_code(cubin: bytes) -> MachineCode:
    """Count the instructions of a kernel. Its main loop is the one with the most; others count as one trip."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP.with_name("nvdisasm"), "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    loops = [
        (labels[match[1]], i)
        for i, line in enumerate(lines)
        if (match := re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", line)) and labels.get(match[1], i) < i
    ]
    loops = [(begin, end) for begin, end in loops if end - begin > 2]  # not the padding after the end
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    once, trip, barriers = Counter[str](), Counter[str](), 0
    for i, line in enumerate(lines):
        if not (match := INSTRUCTION.search(line)):
            continue
        inside = begin < i <= end
        (trip if inside else once)[pipe_of(match[1])] += 1
        barriers += inside and match[1] == "BAR"
    return MachineCode(once, trip, barriers)


def pipe_of(mnemonic: str) -> str:
    return next(pipe for pipe, pattern in PIPES if re.match(pattern, mnemonic))


@dataclass(frozen=True)
class Estimate:
    """A launch on a device."""

    launch: RecordedLaunch
    work: Work
    in_flight: float  # bytes of loads per multiprocessor, to shared memory or L2
    instructions_per_weight: float  # of threads; NaN: no product
    barriers: int  # of a trip of the main loop
    read_s: float
    limited_by_loads: bool  # those in flight do not use the bandwidth
    pipe_s: dict[str, float]  # by pipe, and of issuing all instructions

    @property
    def bound(self) -> str:
        if self.read_s >= max(self.pipe_s.values()):
            return "loads in flight" if self.limited_by_loads else "bandwidth"
        return max(self.pipe_s, key=self.pipe_s.__getitem__)

    @property
    def overlapped_s(self) -> float:
        return max(self.read_s, *self.pipe_s.values()) + NODE_S

    @property
    def serial_s(self) -> float:
        return self.read_s + max(self.pipe_s.values()) + NODE_S


@dataclass(frozen=True)
class Target:
    """A GPU to estimate for."""

    spec: DeviceSpec
    gpu: Gpu

    @property
    def clock_hz(self) -> float:
        return self.spec.flops / self.gpu.multiprocessors / PRODUCT_FLOPS[self.gpu.arch]


def estimate(launch: RecordedLaunch, target: Target) -> Estimate:
    gpu, work = target.gpu, work_of(launch, CONTEXT)
    compiled, code = compiled_code(launch, gpu.arch)
    instructions = code.executed(work.trips)
    per_sm = ceil(work.programs / gpu.multiprocessors)
    resident = min(per_sm, resident_programs(compiled))
    chunks = max(1, compiled.stages - 1, prefetched_chunks(launch))
    in_flight = resident * chunks * work.nbytes / work.programs / work.trips
    reachable, by_loads = target.spec.bandwidth * BANDWIDTH_SHARE, in_flight * gpu.multiprocessors / LATENCY_S
    warps_s = per_sm * compiled.warps / 4 / target.clock_hz  # per cycle of a quarter of a multiprocessor
    pipes = {pipe: warps_s * instructions[pipe] * cycles for pipe, cycles in PIPE_CYCLES[gpu.arch].items()}
    threads = work.programs * compiled.warps * WARP_THREADS
    return Estimate(
        launch,
        work,
        in_flight,
        threads * instructions.total() / work.weights if work.weights else math.nan,
        code.barriers,
        work.nbytes / min(reachable, by_loads) if work.nbytes else 0.0,
        by_loads < reachable,
        {"issue": warps_s * instructions.total(), **pipes},
    )


def prefetched_chunks(launch: RecordedLaunch) -> int:
    """Return how many chunks ahead a program reads its weights into L2."""
    if launch.kernel.__name__ != "small_m_packed_kernel":
        return 0
    return PREFETCH_WORDS.value // launch.arguments["WORDS"]


def resident_programs(compiled: CompiledTriton) -> int:
    """Return how many programs of a kernel fit on a multiprocessor at once."""
    registers = compiled.registers * compiled.warps * 32
    by_memory = SHARED_PER_SM[compiled.arch] // max(1, compiled.shared_bytes + 1024)
    return max(1, min(MAX_PROGRAMS, by_memory, REGISTERS_PER_SM // registers))


def compiled_code(launch: RecordedLaunch, arch: int) -> tuple[CompiledTriton, MachineCode]:
    key = arch, compilation_key(launch)
    if key not in _compiled:
        compiled = compile_for(launch, arch)
        _compiled[key] = compiled, read_machine_code(compiled.cubin)
    return _compiled[key]


_compiled: dict[tuple[int, str], tuple[CompiledTriton, MachineCode]] = {}


def single_kernel_s(parts: list[Estimate], target: Target) -> float:
    """Return the time of all launches at best if one kernel did their work: reading and executing never pause."""
    read_s = sum(part.work.nbytes for part in parts) / (target.spec.bandwidth * BANDWIDTH_SHARE)
    return max(read_s, *(sum(part.pipe_s[pipe] for part in parts) for pipe in parts[0].pipe_s))


def format_tables(models: Sequence[EstimatedModel], targets: Sequence[Target]) -> str:
    steps = [
        "| model | GPU | nodes | read | at best | without overlap | in one kernel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    launches = [
        "| GPU | launch | bytes | instructions per weight | KB in flight | barriers per trip | bound by | µs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in models:
        for target in targets:
            step = record_step(model, target.gpu)
            parts = [estimate(launch, target) for launch in step.launches]
            others_s = step.torch_kernels * NODE_S
            nbytes = sum(part.work.nbytes for part in parts)
            times = (
                sum(part.overlapped_s for part in parts) + others_s,
                sum(part.serial_s for part in parts) + others_s,
                single_kernel_s(parts, target),
            )
            cells = [
                f"{s * 1e3:.2f} ms, {1 / s:.0f} tokens/s, {nbytes / s / target.spec.bandwidth:.0%}" for s in times
            ]
            row = [model.name, target.spec.name, str(step.nodes), f"{nbytes / 1e9:.2f} GB", *cells]
            steps.append(f"| {' | '.join(row)} |")
            if model.name == DETAILED or len(models) == 1:
                launches += [format_launch(target, part) for part in distinct(parts)]
    name = models[0].name if len(models) == 1 else DETAILED
    title = f"Launches of {name} that take longer than {SHOWN_S * 1e6:.1f} µs:"
    return "\n".join([*steps, "", title, "", *launches])


def distinct(parts: list[Estimate]) -> list[Estimate]:
    by_shape = {(part.launch.kernel.__name__, part.launch.grid, part.work): part for part in parts}
    return [part for part in by_shape.values() if part.overlapped_s > SHOWN_S]


def format_launch(target: Target, part: Estimate) -> str:
    arguments, is_product = part.launch.arguments, part.work.weights > 0
    shape = f" {arguments['N']} x {arguments['K']}" if is_product else ""
    row = [
        target.spec.name,
        f"`{part.launch.kernel.__name__}`{shape}",
        f"{part.work.nbytes / 1e6:.1f} MB",
        f"{part.instructions_per_weight:.2f}" if is_product else "-",
        f"{part.in_flight / 1e3:.0f}",
        str(part.barriers),
        part.bound,
        f"{part.overlapped_s * 1e6:.1f} to {part.serial_s * 1e6:.1f}",
    ]
    return f"| {' | '.join(row)} |"


def count_costs(targets: Sequence[Target]) -> dict[str, Any]:
    """Return the content of gpu_costs.json, from the first target of each architecture."""
    by_arch = {target.gpu.arch: target for target in reversed(targets)}
    nodes = {kind: record_layers(shape, 1).nodes for kind, shape in LAYERS.items()}
    layers = {kind: record_layers(shape, 2).nodes - nodes[kind] for kind, shape in LAYERS.items()}
    return {
        "bandwidth_share": BANDWIDTH_SHARE,
        "node_s": NODE_S,
        "nodes": {"step": nodes["mlp"] - layers["mlp"], **layers},
        "cycles": {str(arch): format_cycles(by_arch[arch]) for arch in sorted(by_arch)},
    }


def record_layers(shape: dict[str, Any], layers: int) -> RecordedStep:
    config = shape | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    return record_step(EstimatedModel("", config, quantized_layers), GPUS[90])


def format_cycles(target: Target) -> dict[str, float]:
    """Return the cycles of a multiprocessor per byte: of weights by format, of experts, and of the cache."""
    cycles = {name: cycles_per_byte(product_launches(name, target.gpu), target) for name in FORMATS}
    for name in EXPERT_FORMATS:
        step = record_step(
            EstimatedModel(
                "",
                LAYERS["moe"] | {"num_hidden_layers": 1},
                lambda each, n=name: n if ".experts." in each else None,
            ),
            target.gpu,
        )
        launches = [each for each in step.launches if each.kernel.__name__ == "grouped_matmul_kernel"]
        cycles[f"{EXPERTS}{name}"] = cycles_per_byte(launches, target)
    with record_launches(target.gpu) as launches:
        attention_example(AttentionConfig(32, 8, 128, None, 0.1), torch.bfloat16, 1, 1)()
    cycles[CACHE] = cycles_per_byte(launches, target)
    return {name: float(f"{value:.3g}") for name, value in cycles.items()}


def product_launches(name: str, gpu: Gpu) -> list[RecordedLaunch]:
    """Record a product of one row with a matrix of an 8B model."""
    rows, columns = 14_336, 4096
    x = meta_tensor(1, columns)
    group = {"int4": 128, "mxfp4": 32}.get(name)
    weight = meta_tensor(rows, columns) if name == DENSE else meta_packed_weight(name, rows, columns, group)
    with record_launches(gpu) as launches, torch.inference_mode():
        kernels.linear(x, weight)
    return launches


def cycles_per_byte(launches: Sequence[RecordedLaunch], target: Target) -> float:
    """Return the cycles in which a multiprocessor executes the instructions for a byte that is read."""
    parts = [estimate(launch, target) for launch in launches]
    seconds = sum(max(part.pipe_s.values()) for part in parts)
    nbytes = sum(part.work.nbytes for part in parts)
    return seconds * target.clock_hz * target.gpu.multiprocessors / nbytes


def write_costs(targets: Sequence[Target]) -> None:
    COSTS.write_text(json.dumps(count_costs(targets), indent=1) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    targets = [Target(find_device(name), Gpu(arch, count)) for name, arch, count in DEVICES]
    if names == ["--costs"]:
        return write_costs(targets)
    if names:
        model, gpu = names
        models = [each for each in MODELS if each.name == model]
        print(format_tables(models, [target for target in targets if target.spec == find_device(gpu)]))
        return
    write_costs(targets)
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    tables = format_tables(MODELS, targets)
    PAGE.write_text(f"{before}{MARKS[0]}{tables}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

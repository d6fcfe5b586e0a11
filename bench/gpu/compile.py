"""Compiles the kernels of the generated models on all cores before anything is measured, into the cache where the
other parts find them: what compiling takes is in nobody's time.

The models have one layer and are on device `meta`. Their steps are those that loading warms up; kernels are noted
instead of launched, and compiled as Triton's own launcher compiles them.
"""

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from bench.gpu.generated import SHAPES, TINY, Form, RandomSource, config_of
from bench.gpu.loop import DTYPE
from bench.gpu.setting import Row, Setting
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING
from localllm.runtime.cuda_graphs import CudaGraphs
from localllm.runtime.gpu_sampler import GpuSampler
from localllm.runtime.kernels.gpu.launch import Gpu, RecordedLaunch, gpu_of, record_launches, without_pdl
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.model import Decoder
from localllm.runtime.model_loader import run_every_kind_of_step
from localllm.runtime.runner import Runner

BUDGET_S = 400  # beside the ten minutes of the others
META = torch.device("meta")
CONTEXT, BLOCKS = 512, 64
WARP_THREADS = 32
MODELS: tuple[tuple[str, Form], ...] = (
    *(("8B", "int4"), ("8B", "bf16"), ("8B", "int8"), ("1B", "bf16"), ("1B", "int4"), ("1B", "int8")),
    *(("32B", "int4"), ("32B", "int8"), ("32B", "bf16"), ("70B", "int4")),
)


def measure(setting: Setting) -> Iterator[Row]:
    if setting.device.type != "cuda":
        yield {"left out": "there is nothing to compile for a processor"}
        return
    gpu, processes = gpu_of(setting.device), os.cpu_count() or 1
    for name, form in MODELS[:1] if setting.tiny else MODELS:
        start = time.perf_counter()
        launches = noted(TINY if setting.tiny else SHAPES[name], form, gpu)
        compile_all(launches, gpu, processes)
        yield {
            **{"model": name, "weights": form, "kernels": len(launches)},
            **{"s": time.perf_counter() - start, "processes": processes},
        }


@torch.inference_mode()
def noted(shape: dict[str, Any], form: Form, gpu: Gpu) -> list[RecordedLaunch]:
    """The launches of all kinds of steps; each kernel with its arguments once, with and without early starts."""
    found: dict[str, RecordedLaunch] = {}
    for early in (True, False):
        with record_launches(gpu) as launches, ExitStack() as options:
            if not early:
                options.enter_context(without_pdl())
            runner, pool = runner_of(shape | {"num_hidden_layers": 1}, form)
            run_every_kind_of_step(runner, pool)
        for launch in launches:
            found.setdefault(described(launch), launch)
    return list(found.values())


def runner_of(shape: dict[str, Any], form: Form) -> tuple[Runner, BlockPool]:
    config = config_of(shape, form)
    decoder = Decoder(config, RandomSource(form, META, DTYPE, config.tie_embeddings), CONTEXT)
    runner = Runner(decoder, BLOCKS, BLOCK_SIZE, DTYPE, META, max_running=MAX_RUNNING)
    runner.gpu_sampler = GpuSampler(MAX_RUNNING, CONTEXT, config.vocab_size, META)
    runner.graphs = CudaGraphs(
        *(decoder, runner.caches, runner.gpu_sampler, runner.newest_tokens, BLOCK_SIZE, CONTEXT, BLOCKS, 0)
    )
    return runner, BlockPool(BLOCKS, BLOCK_SIZE)


def described(launch: RecordedLaunch) -> str:
    """What a compilation depends on: of numbers, whether they are 1 or divisible by 16, if that."""

    def shown(parameter: Any) -> object:
        value = launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            return value.dtype
        if parameter.is_constexpr or type(value) is not int:
            return value if parameter.is_constexpr or value is None else type(value)
        return "an integer" if parameter.do_not_specialize else (value == 1, value % 16 == 0)

    return f"{launch.kernel.__name__} {[shown(each) for each in launch.kernel.params]} {dict(launch.options)}"


@dataclass(frozen=True)
class AbsentGpu:
    """What Triton asks its driver while it compiles, without a driver."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(launches: Iterable[RecordedLaunch], gpu: Gpu, processes: int) -> None:
    """In forked processes, which find the launches in their memory and use no GPU."""
    waiting = list(launches)
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=compile_some, args=(waiting[i::processes], gpu))
        for i in range(min(processes, len(waiting)))
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a kernel could not be compiled; its error is on stderr")


def compile_some(launches: list[RecordedLaunch], gpu: Gpu) -> None:
    absent: Any = AbsentGpu(GPUTarget("cuda", gpu.arch, WARP_THREADS))  # no driver by its class
    triton.runtime.driver.set_active(absent)
    for launch in launches:
        launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)

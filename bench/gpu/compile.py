"""Compiles the kernels of the generated models on all cores before anything is measured, into the cache that the
other parts use, so that no budget includes compilation.

The models have one layer and are on device `meta`. Their steps are those that loading warms up; kernels are
recorded instead of launched, and compiled as Triton's own launcher compiles them.
"""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from bench.gpu.setting import Row, Setting
from localllm.benchmark.gpu.decode_steps import DTYPE
from localllm.benchmark.gpu.generated import SHAPES, TINY, Form, RandomSource, config_of
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING
from localllm.runtime.cuda_graphs import CudaGraphs
from localllm.runtime.gpu_sampler import GpuSampler
from localllm.runtime.kernels.gpu.launch import Gpu, RecordedLaunch, gpu_of, record_launches, without_pdl
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.model import Decoder
from localllm.runtime.model_loader import run_every_kind_of_step
from localllm.runtime.runner import Runner
from tools.triton_aot import compilation_key, compile_all

BUDGET_S = 400  # beside the twelve minutes of the others
META = torch.device("meta")
CONTEXT, BLOCKS = 512, 64
MODELS: tuple[tuple[str, Form], ...] = (
    *(("8B", "int4"), ("8B", "bf16"), ("8B", "int8"), ("1B", "bf16"), ("1B", "int4"), ("1B", "int8")),
    *(("32B", "int4"), ("32B", "int8"), ("32B", "bf16"), ("70B", "int4")),
)


def measure(setting: Setting) -> Iterator[Row]:
    if setting.device.type != "cuda":
        yield {"left out": "nothing is compiled for a CPU"}
        return
    gpu, processes = gpu_of(setting.device), os.cpu_count() or 1
    for name, form in MODELS[:1] if setting.tiny else MODELS:
        start = time.perf_counter()
        launches = record_steps(TINY if setting.tiny else SHAPES[name], form, gpu)
        compile_all(launches, gpu, processes)
        yield {
            **{"model": name, "weights": form, "kernels": len(launches)},
            **{"s": time.perf_counter() - start, "processes": processes},
        }


@torch.inference_mode()
def record_steps(shape: dict[str, Any], form: Form, gpu: Gpu) -> list[RecordedLaunch]:
    """Record one launch per compilation of all kinds of steps, with and without programmatic dependent launch."""
    unique: dict[str, RecordedLaunch] = {}
    for pdl in (True, False):
        with record_launches(gpu) as launches, nullcontext() if pdl else without_pdl():
            runner, pool = runner_of(shape | {"num_hidden_layers": 1}, form)
            run_every_kind_of_step(runner, pool)
        for launch in launches:
            unique.setdefault(compilation_key(launch), launch)
    return list(unique.values())


def runner_of(shape: dict[str, Any], form: Form) -> tuple[Runner, BlockPool]:
    config = config_of(shape, form)
    decoder = Decoder(config, RandomSource(form, META, DTYPE, config.tie_embeddings), CONTEXT)
    runner = Runner(decoder, BLOCKS, BLOCK_SIZE, DTYPE, META, max_running=MAX_RUNNING["cuda"])
    runner.gpu_sampler = GpuSampler(MAX_RUNNING["cuda"], CONTEXT, config.vocab_size, META)
    runner.graphs = CudaGraphs(
        *(decoder, runner.caches, runner.gpu_sampler, runner.newest_tokens, BLOCK_SIZE, CONTEXT, BLOCKS, 0)
    )
    return runner, BlockPool(BLOCKS, BLOCK_SIZE)

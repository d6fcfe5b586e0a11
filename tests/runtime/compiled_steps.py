"""`python -m tests.runtime.compiled_steps FOLDER|FORM...` warms up each model as loading does on a GPU, runs steps
of random sequences, and ends with 1 where one of them would compile a kernel.

Models are on device `meta`, and kernels are recorded instead of launched, so that no GPU is needed; Triton must
not interpret them.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from localllm.arch.cost import state_bytes
from localllm.arch.describe import parse_config
from localllm.benchmark.gpu.generated import TINY, RandomSource, config_of
from localllm.checkpoint.header import read_header
from localllm.checkpoint.tensors import Weights
from localllm.plan.memory import MAX_RUNNING
from localllm.request import SamplingParams
from localllm.runtime.batch import Batch
from localllm.runtime.cuda_graphs import QUERY_LENS, CudaGraphs, GraphKey
from localllm.runtime.gpu_sampler import GpuSampler, variant_of
from localllm.runtime.kernels.gpu import register  # noqa: F401 (as where there is a GPU)
from localllm.runtime.kernels.gpu.launch import GPUS, RecordedLaunch, record_launches
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.model import Decoder
from localllm.runtime.model_loader import run_every_kind_of_step
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import SamplingSpec
from localllm.runtime.weight_source import WeightSource
from tools.triton_aot import compilation_key

META = torch.device("meta")
CONTEXT, BLOCK_SIZE, BLOCKS, STATES = 256, 8, 4000, 512
RUNNING = MAX_RUNNING["cuda"]  # most sequences of a step
STEPS = 25  # random ones, of each model


def runner_of(model: str) -> Runner:
    """model: a folder, or a form of a generated Llama"""
    if (folder := Path(model)).is_dir():
        header = read_header(folder)
        config, source = parse_config(header.config), WeightSource(Weights(header), META, torch.bfloat16)
    else:
        config, source = config_of(TINY, model), RandomSource(model, META)  # pyright: ignore[reportArgumentType]
    states = STATES if state_bytes(config, 2) else 0
    runner = Runner(
        Decoder(config, source, CONTEXT), BLOCKS, BLOCK_SIZE, torch.bfloat16, META, states, max_running=RUNNING
    )
    runner.gpu_sampler = GpuSampler(RUNNING, CONTEXT, config.vocab_size, META)
    runner.graphs = CudaGraphs(
        runner.model, runner.caches, runner.gpu_sampler, runner.newest_tokens, BLOCK_SIZE, CONTEXT, BLOCKS, states
    )
    return runner


def random_steps(runner: Runner, pool: BlockPool) -> Iterator[str]:
    """Run steps as an engine may, captured ones included; yields a description of each."""
    rng = random.Random(0)
    for _ in range(STEPS):
        sequences = rng.randrange(0, rng.choice((4, 24, RUNNING)))
        few = [rng.choice((1, 1, 1, 2, 3, 5, 9, 16)) for _ in range(sequences)]
        many = [rng.choice((17, 30, 47, 64, 100, 150)) for _ in range(rng.randrange(0, 2 if few else 3))]
        counts = [*few, *many] or [1]
        rng.shuffle(counts)
        yield f"tokens of the sequences: {counts}"
        states = [SequenceState(pool) for _ in counts]
        for state, count in zip(states, counts, strict=True):
            state.extend(rng.randrange(90) + count)
            state.plan_saves(count, 1000, [state.length - 1] if rng.random() < 0.5 and count < 17 else ())
        tokens = [[1] * count for count in counts]
        ends = [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
        logits = runner.launch(Batch.from_states(states, tokens, ends, META, pool.drain_copies()))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7)), top_k=5, repetition_penalty=rng.choice((1.0, 1.2))
        )
        specs = [SamplingSpec(params, 1, 1, [5], Counter([5]), history_slot=i) for i in range(len(counts))]
        assert runner.gpu_sampler
        runner.gpu_sampler.sample(logits, specs)
        for state in states:
            state.free()
    assert runner.graphs
    for bucket, count in ((1, 1), (2, 1), (8, 4), (4, 8), (1, 16), (32, 1), (96, 1), (12, 4)):
        for temperature, penalty in ((0.0, 1.0), (0.7, 1.0), (0.7, 1.2)):
            yield f"captured: {bucket} sequences, {count} tokens each, temperature {temperature}"
            assert count in QUERY_LENS
            capture(
                runner.graphs, bucket, count, SamplingParams(temperature=temperature, repetition_penalty=penalty)
            )


def capture(graphs: CudaGraphs, bucket: int, count: int, params: SamplingParams) -> None:
    specs = [SamplingSpec(params, 1, 1, [5], Counter([5]), history_slot=i) for i in range(2)]
    graphs.run(GraphKey(bucket, count, variant_of(specs, graphs.model.config.vocab_size), keep_logits=False))


def keys_of(launches: Iterable[RecordedLaunch]) -> set[str]:
    return {compilation_key(each) for each in launches}


def main(models: list[str]) -> int:
    WeightSource.checked_finite = lambda self, name, tensor: tensor  # values that no tensor here has
    faults = 0
    for model in models:
        with torch.inference_mode(), record_launches(GPUS[90]) as launches:
            runner = runner_of(model)
            pool = BlockPool(BLOCKS, BLOCK_SIZE, STATES if runner.recurrent_caches else 0)
            run_every_kind_of_step(runner, pool)
            compiled = keys_of(launches)
            launches.clear()
            step = "none"
            for following in random_steps(runner, pool):
                for key in keys_of(launches) - compiled:
                    print(f"{model}: a kernel is compiled for {step}: {key}")
                    faults += 1
                compiled |= keys_of(launches)
                launches.clear()
                step = following
            assert not keys_of(launches) - compiled, step
        print(f"{model}: {len(compiled)} kernels are compiled when it is loaded")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

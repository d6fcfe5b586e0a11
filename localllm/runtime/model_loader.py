"""Loads a model's weights to its device, and runs the first steps there."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.pooling import Pooling
from localllm.checkpoint.header import Header
from localllm.checkpoint.tensors import Weights
from localllm.metrics import PhaseTimer
from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.kept_weights import KeptLayout
from localllm.runtime.kernels.cpu.compile import compile_only, cpu_supported
from localllm.runtime.kernels.threads import use_threads
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.model import Decoder, Encoder
from localllm.runtime.pooling import Pooler
from localllm.runtime.ranks import Ranks
from localllm.runtime.runner import Runner
from localllm.runtime.weight_loader import CudaCopier, WeightLoader
from localllm.runtime.weight_source import WeightSource

T = TypeVar("T")
OnPart = Callable[[int, int], None]  # bytes of weights read so far, and in total

# Tokens of each sequence in the steps that compile a GPU's kernels: each calls kernels, or has tiles, that others
# do not. Products change at 17, 33, 65 and 128 tokens, attention at 17, convolutions at powers of two up to 16; in
# the last step, a prompt and an answer meet.
WARM_UP_STEPS = ((128,), (65,), (33,), (17,), (16,), (8,), (4,), (2,), (1,), (17, 1))
KERNEL_ROWS = (1, 2, 3, 4)  # tokens of steps on a CPU that call different kernels; more tokens call those of 4


def load_decoder(
    header: Header,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_len: int,
    phases: PhaseTimer,
    on_part: OnPart = lambda done, total: None,
    activation_bits: int | None = None,
    layout: KeptLayout | None = None,
    ranks: Ranks | None = None,
) -> tuple[Decoder, float | None]:
    """Load a decoder. Also returns the read rate in bytes/s, None on a CPU, where weights are mapped.

    ranks: of which this process is one; header and config are those of this one
    """
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    return build_from_files(
        header,
        device,
        dtype,
        phases,
        spare,
        lambda source: Decoder(config, source, max_len),
        on_part,
        activation_bits,
        layout,
        ranks,
    )


def load_encoder(
    header: Header,
    config: ModelConfig,
    pooling_config: Pooling,
    device: torch.device,
    dtype: torch.dtype,
    max_len: int,
    phases: PhaseTimer,
) -> tuple[Encoder, Pooler]:
    """Load an encoder, and the pooler that turns its token vectors into one vector per text."""

    def build(source: WeightSource) -> tuple[Encoder, Pooler]:
        model, pool = Encoder(config, source, max_len), Pooler(pooling_config, source)
        source.weights.finish()
        return model, pool

    return build_from_files(header, device, dtype, phases, (), build)[0]


def build_from_files(
    header: Header,
    device: torch.device,
    dtype: torch.dtype,
    phases: PhaseTimer,
    skipped_names: Collection[str],
    build: Callable[[WeightSource], T],
    on_part: OnPart = lambda done, total: None,
    activation_bits: int | None = None,
    layout: KeptLayout | None = None,
    ranks: Ranks | None = None,
) -> tuple[T, float | None]:
    """Build a model from mapped files on a CPU, or from a WeightLoader that reads ahead on a GPU.

    Returns the model and the read rate in bytes/s (None on a CPU). skipped_names: tensors that are not needed;
    on_part: called before each tensor is read; an exception from it ends the loading; layout, ranks: see
    `WeightSource`
    """
    tensors = {name: tensor for name, tensor in header.tensors.items() if name not in skipped_names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    read_bytes = 0

    def on_read(count: int) -> None:
        nonlocal read_bytes
        on_part(read_bytes, total)
        read_bytes += count

    if device.type == "cpu":
        weights = Weights(header, on_read=on_read)
        model = build(WeightSource(weights, device, dtype, phases, activation_bits, layout, ranks))
        on_part(total, total)
        return model, None
    with WeightLoader(tensors, CudaCopier(device), phases=phases) as loader:
        weights = Weights(header, reader=loader, on_read=on_read)
        model = build(WeightSource(weights, device, dtype, phases, ranks=ranks))
        loader.check_unchanged()
        torch.cuda.synchronize(device)
    on_part(total, total)
    return model, loader.bytes_per_s


def set_triton_cache_dir(cache: Path) -> None:
    """Make Triton cache compiled kernels below the user's cache folder, unless the environment names another
    one.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def warm_up(runner: Runner, pool: BlockPool) -> None:
    """Run a step of every kind on a GPU, so that no request waits for the compilation of a kernel."""
    run_every_kind_of_step(runner, pool)
    torch.cuda.synchronize(runner.device)


def run_every_kind_of_step(runner: Runner, pool: BlockPool) -> None:
    """Launch every kernel that steps of any size launch."""
    for counts in WARM_UP_STEPS:
        for saves in (False, True) if pool.recurrent and max(counts) > 1 else (False,):
            run_step(runner, pool, counts, saves=saves)
    if runner.gpu_sampler:
        runner.gpu_sampler.warm_up()
    if runner.graphs:
        runner.graphs.warm_up()


def run_step(runner: Runner, pool: BlockPool, counts: Collection[int], *, saves: bool) -> None:
    """Run a step of sequences with these numbers of tokens; none if the cache is too small for it.

    saves: save a recurrent state within each sequence with several new tokens, as verification does
    """
    states = [SequenceState(pool) for _ in counts]
    try:
        for state, count in zip(states, counts, strict=True):
            state.extend(count)
            if saves and count > 1:
                state.plan_save(count - 1)
        tokens = [[0] * count for count in counts]
        batch = Batch.from_states(states, tokens, list(range(sum(counts))), runner.device, pool.drain_copies())
        runner.launch(batch)
    except OutOfBlocks:
        return
    finally:
        for state in states:
            state.free()


def compile_kernels(runner: Runner, pool: BlockPool, threads: int) -> None:
    """Compile the CPU kernels of prefill and decode steps, without computing: no weight is read.

    threads: of later steps, on which the division of work depends.
    """
    if not cpu_supported():
        return
    with use_threads(threads), compile_only():
        for count in KERNEL_ROWS:
            run_step(runner, pool, (count,), saves=False)


def compile_encoder_kernels(encoder: Encoder, pooler: Pooler, threads: int) -> None:
    """Compile the CPU kernels of an encoder's batches, as `compile_kernels` does those of a decoder's steps."""
    if not cpu_supported():
        return
    with use_threads(threads), compile_only():
        for count in KERNEL_ROWS:
            text = EncoderBatch.from_token_ids([[0] * count], torch.device("cpu"))
            pooler.pool_batch(encoder(text), text)

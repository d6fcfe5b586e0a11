"""A model's weights to its device, and the first steps there."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.pooling import Pooling
from localllm.checkpoint.header import Header
from localllm.checkpoint.safetensors import Weights
from localllm.metrics import Phases
from localllm.runtime.encoder import Encoder
from localllm.runtime.engine import Engine
from localllm.runtime.load import Source
from localllm.runtime.model import Decoder
from localllm.runtime.pooling import Pool
from localllm.runtime.transfer import Transfer
from localllm.runtime.ways import Streamed

T = TypeVar("T")
Part = Callable[[int, int], None]  # bytes of weights that are read, of how many

WARM_TOKENS = 64  # of a first step, which compiles the kernels of prompts


def load_decoder(
    header: Header,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    phases: Phases,
    on_part: Part = lambda done, total: None,
) -> tuple[Decoder, float | None]:
    """And how many bytes were read a second, as `read`."""
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    return read(header, device, dtype, phases, spare, lambda source: Decoder(config, source, context), on_part)


def load_encoder(
    header: Header,
    config: ModelConfig,
    how: Pooling,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    phases: Phases,
) -> tuple[Encoder, Pool]:
    """With what makes one vector of those of a text's tokens."""

    def build(source: Source) -> tuple[Encoder, Pool]:
        model, pool = Encoder(config, source, context), Pool(how, source)
        source.weights.finish()
        return model, pool

    return read(header, device, dtype, phases, (), build)[0]


def read(
    header: Header,
    device: torch.device,
    dtype: torch.dtype,
    phases: Phases,
    spare: Collection[str],
    build: Callable[[Source], T],
    on_part: Part = lambda done, total: None,
) -> tuple[T, float | None]:
    """On a CPU of mapped files, on a GPU of what is read ahead; and how many bytes were read a second, if any.
    spare: names of tensors that are not needed; on_part: told before each tensor, and what it raises ends it."""
    tensors = {name: tensor for name, tensor in header.tensors.items() if name not in spare}
    total = sum(tensor.nbytes for tensor in tensors.values())
    taken = 0

    def on_read(count: int) -> None:
        nonlocal taken
        on_part(taken, total)
        taken += count

    if device.type == "cpu":
        built = build(Source(Weights(header, on_read=on_read), device, dtype, phases))
        on_part(total, total)
        return built, None
    with Transfer(tensors, Streamed(device), phases=phases) as transfer:
        built = build(Source(Weights(header, reader=transfer, on_read=on_read), device, dtype, phases))
        transfer.check_unchanged()
        torch.cuda.synchronize(device)
    on_part(total, total)
    return built, transfer.bytes_per_s


def keep_kernels(cache: Path) -> None:
    """Have Triton keep what it compiles in a folder of the user's caches, unless the environment names another."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def warm_up(engine: Engine) -> None:
    """A step of some tokens and one of one, so that their kernels are compiled before anybody waits for them."""
    for count in (min(WARM_TOKENS, engine.pool.count * engine.pool.block_size), 1):
        engine.logits([0] * count)
    torch.cuda.synchronize(engine.runner.device)

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
from localllm.metrics import PhaseTimer
from localllm.runtime.engine import Engine
from localllm.runtime.model import Decoder, Encoder
from localllm.runtime.pooling import Pooler
from localllm.runtime.weight_loader import CudaCopier, WeightLoader
from localllm.runtime.weight_source import WeightSource

T = TypeVar("T")
OnPart = Callable[[int, int], None]  # bytes of weights that are read, of how many

WARM_UP_TOKENS = 64  # of a first step, which compiles the kernels of prompts


def load_decoder(
    header: Header,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_len: int,
    phases: PhaseTimer,
    on_part: OnPart = lambda done, total: None,
) -> tuple[Decoder, float | None]:
    """And how many bytes were read a second, as `read`."""
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    return build_from_files(
        header, device, dtype, phases, spare, lambda source: Decoder(config, source, max_len), on_part
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
    """With what makes one vector of those of a text's tokens."""

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
) -> tuple[T, float | None]:
    """On a CPU of mapped files, on a GPU of what is read ahead; and how many bytes were read a second, if any.
    skipped_names: names of tensors that are not needed; on_part: told before each tensor, and what it raises ends
    it."""
    tensors = {name: tensor for name, tensor in header.tensors.items() if name not in skipped_names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    taken = 0

    def on_read(count: int) -> None:
        nonlocal taken
        on_part(taken, total)
        taken += count

    if device.type == "cpu":
        built = build(WeightSource(Weights(header, on_read=on_read), device, dtype, phases))
        on_part(total, total)
        return built, None
    with WeightLoader(tensors, CudaCopier(device), phases=phases) as transfer:
        built = build(WeightSource(Weights(header, reader=transfer, on_read=on_read), device, dtype, phases))
        transfer.check_unchanged()
        torch.cuda.synchronize(device)
    on_part(total, total)
    return built, transfer.bytes_per_s


def set_triton_cache_dir(cache: Path) -> None:
    """Have Triton keep what it compiles in a folder of the user's caches, unless the environment names another."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def warm_up(engine: Engine) -> None:
    """A step of some tokens and one of one, so that their kernels are compiled before anybody waits for them."""
    for count in (min(WARM_UP_TOKENS, engine.block_count * engine.block_size), 1):
        engine.logits([0] * count)
    torch.cuda.synchronize(engine.device)

"""A model's weights to its device, and the first steps there."""

import os
from pathlib import Path

import torch

from localllm.arch.config import ModelConfig
from localllm.checkpoint.header import Header
from localllm.checkpoint.safetensors import Weights
from localllm.metrics import Phases
from localllm.runtime.engine import Engine
from localllm.runtime.load import Source
from localllm.runtime.model import Decoder
from localllm.runtime.transfer import Transfer
from localllm.runtime.ways import Streamed

WARM_TOKENS = 64  # of a first step, which compiles the kernels of prompts


def load_decoder(
    header: Header, config: ModelConfig, device: torch.device, dtype: torch.dtype, context: int, phases: Phases
) -> tuple[Decoder, float | None]:
    """On a CPU of mapped files, on a GPU of what is read ahead; and how many bytes were read a second, if any."""
    if device.type == "cpu":
        return Decoder(config, Source(Weights(header), device, dtype, phases), context), None
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    tensors = {name: tensor for name, tensor in header.tensors.items() if name not in spare}
    with Transfer(tensors, Streamed(device), phases=phases) as transfer:
        decoder = Decoder(config, Source(Weights(header, reader=transfer), device, dtype, phases), context)
        transfer.check_unchanged()
        torch.cuda.synchronize(device)
    return decoder, transfer.bytes_per_s


def keep_kernels(cache: Path) -> None:
    """Have Triton keep what it compiles in a folder of the user's caches, unless the environment names another."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def warm_up(engine: Engine) -> None:
    """A step of some tokens and one of one, so that their kernels are compiled before anybody waits for them."""
    for count in (min(WARM_TOKENS, engine.pool.count * engine.pool.block_size), 1):
        engine.logits([0] * count)
    torch.cuda.synchronize(engine.runner.device)

"""Tiny random checkpoints of every family, made by `transformers`, and engines over them. Weights, norms and
biases are so large that an error in any of them changes the logits visibly.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from localllm.arch.cost import state_bytes
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.tensors import Weights
from localllm.quant.vectors import INT4, KVDtype
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.policy import Drafter
from localllm.runtime.weight_source import WeightSource

CPU = torch.device("cpu")

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": None,
    "attn_implementation": "eager",
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rounded_copy(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Copy a checkpoint with its floats rounded to `dtype`, unless the copy exists."""
    if not folder.exists():
        shutil.copytree(model, folder)
        file = folder / "model.safetensors"
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


def make_checkpoint(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint of `kind` (`Llama`, `Qwen3`, ...) and return the transformers model."""
    import transformers  # where only kernels are tested it may be missing

    name = f"{kind}ForCausalLM"
    family = getattr(transformers, name, None)
    if family is None:
        raise LookupError(f"transformers {transformers.__version__} has no {name}; install a version that has it")
    torch.manual_seed(seed)
    model = family(family.config_class(**SMALL | changes)).eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def randomize(model: Any) -> None:
    """Set weights, norms and biases to random values so large that an error in any of them changes the logits
    visibly.
    """
    with torch.no_grad():
        for weight in weights_of(model):
            if weight.dim() == 1:  # around what they begin as: norms around 1, or 0 where stored less one
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.copy_(torch.randn_like(weight) * 2 / weight.shape[-1] ** 0.5)


def weights_of(model: Any) -> list[torch.Tensor]:
    """Return the parameters, and the buffers that training changes: router biases and layer scales."""
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(("_bias", "layer_scalar"))]
    return [*model.parameters(), *buffers]


def make_engine(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    blocks: int = 64,
    block_size: int = 8,
    token_budget: int = 512,
    max_running: int = 16,
    context: int = 256,
    rows: int = 24,
    kv_dtype: KVDtype | None = None,
    graphs: bool = False,
    aside: int = 0,
    device: torch.device = CPU,
    drafter: Drafter | None = None,
    deterministic: bool = False,
) -> Engine:
    """Return an engine over a checkpoint.

    rows: recurrent states, if the model has any; graphs: run steps as if they were captured; aside: blocks of the
    host tier, which otherwise only GPUs have.
    """
    header = read_header(folder)
    check_quantization(header.config)
    config = parse_config(header.config)
    rows = rows if state_bytes(config, dtype.itemsize) else 0
    decoder = Decoder(config, WeightSource(Weights(header), device, dtype), context)
    captured = context if graphs or device.type == "cuda" else None
    runner = Runner(
        decoder, blocks, block_size, dtype, device, rows, kv_dtype, max_running, captured, deterministic
    )
    for cache in runner.caches:  # so that a read of an unwritten element shows
        for tensor in vars(cache).values():
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in (torch.int8, INT4):  # which have scales
                tensor.fill_(torch.nan)
    return Engine(runner, BlockPool(blocks, block_size, rows, aside), token_budget, max_running, drafter)

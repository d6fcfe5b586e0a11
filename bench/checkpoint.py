"""Writes a Llama with random weights in bfloat16, in the shape of Llama 3.2 1B. Speed does not depend on the
values of weights.
"""

from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def make(folder: Path) -> None:
    """Write config.json, model.safetensors and a tokenizer.json with an artificial vocabulary."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=None, bos_token_id=None))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="100GB")
    vocabulary = {f"t{i}": i for i in range(SHAPE["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "t0")).save(str(folder / "tokenizer.json"))

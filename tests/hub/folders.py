"""Model folders of a few hundred bytes without real weights, enough for name resolution."""

import json

import numpy
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
SNAPSHOT = "0123456789abcdef0123456789abcdef01234567"


def write_model(folder, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    save_file({"a": numpy.zeros((3, 4), numpy.float16)}, folder / "model.safetensors")
    return folder


def write_cached(cache, repo, **config):
    """Write a repository in the layout of the Hugging Face cache."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(SNAPSHOT)
    (root / "blobs").mkdir()
    return write_model(root / "snapshots" / SNAPSHOT, **config)

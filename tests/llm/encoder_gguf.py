"""Random encoders as GGUF in the form of llama.cpp's converter, with word pieces."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.gguf_writer import add
from tests.llm.encoder_checkpoints import VOCABULARY

ARCHITECTURES = {"BertModel": "BERT", "NomicBertModel": "NOMIC_BERT", "Gemma3TextModel": "GEMMA_EMBEDDING"}
POOLINGS = {"mean": 1, "cls": 2, "last": 3}


def write_encoder(
    folder: Path,
    file: Path,
    pooling: str,
    changed: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Write a GGUF file, including the dense layers of `2_Dense` and `3_Dense`. kind: of the layers' matrices."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    arch = gguf.MODEL_ARCH[architecture]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    keys = {f"{writer.arch}.{key}": value for key, value in keys_of(architecture, config, pooling).items()}
    for key, value in {**keys, **tokenizer_keys(), **(changed or {})}.items():
        if value is not None:
            add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for stored, tensor in load_file(folder / "model.safetensors").items():
        if "pooler" in stored:
            continue
        if architecture == "GEMMA_EMBEDDING" and stored.endswith("norm.weight"):
            tensor = tensor + 1
        name = names.get_name(
            stored if architecture != "GEMMA_EMBEDDING" else f"model.{stored}", (".weight", ".bias")
        )
        packed = kind if name.startswith("blk") and tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        values = np.ascontiguousarray(tensor.float().numpy())
        writer.add_tensor(name, gguf.quantize(values, packed), raw_dtype=packed)
    for place in (2, 3):
        if (dense := folder / f"{place}_Dense" / "model.safetensors").is_file():
            writer.add_tensor(f"dense_{place}.weight", load_file(dense)["linear.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def keys_of(architecture: str, config: dict[str, Any], pooling: str) -> dict[str, Any]:
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.causal": False,
        "pooling_type": POOLINGS[pooling],
    }
    if architecture == "GEMMA_EMBEDDING":
        ropes = config["rope_parameters"]
        return keys | {
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
            "rope.freq_base": ropes["full_attention"]["rope_theta"],
            "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        }
    keys["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
    if architecture == "NOMIC_BERT":
        keys["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    return keys


def tokenizer_keys() -> dict[str, Any]:
    tokens = [phantom(token) for token in VOCABULARY]
    kinds = [3 if i < 5 else 1 for i in range(len(tokens))]
    ids = {"bos": 2, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()},
    }


def phantom(token: str) -> str:
    """Convert a token like BertModel.set_vocab: mark tokens that begin a word, instead of continuations."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else "▁" + token


def linear(columns: int, rows: int) -> torch.nn.Linear:
    return torch.nn.Linear(columns, rows, bias=False)

"""`config.json` of GGUF's embedders: BERT, NomicBert and EmbeddingGemma; and the pooling that any file specifies.

Sources: llama.cpp's `src/models/{bert,gemma-embedding}.cpp`, `conversion/bert.py`.
"""

from localllm.arch.pooling import POOLING
from localllm.checkpoint.gguf.fields import GGUFFields
from localllm.checkpoint.gguf.parts import Config, dense, head_size, layer_count, layer_types, rope_by_kind
from localllm.errors import DamagedModel, UnsupportedModel

POOLING_TYPES = {1: "mean", 2: "cls", 3: "last"}  # values of `pooling_type`; 0 is unspecified
RANK_POOLING = 4
DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")


def bert(gguf: GGUFFields) -> Config:
    """BERT and RoBERTa, whose converter removes the positions that no token has."""
    return encoder_sizes(gguf) | {
        "architectures": ["BertModel"],
        "max_position_embeddings": row_count(gguf, "position_embd.weight"),
        "hidden_act": "gelu",
    }


def nomic_bert(gguf: GGUFFields) -> Config:
    if gguf.flag("attention.causal", False) or not gguf.has_tensor("blk.0.ffn_gate.weight"):
        raise UnsupportedModel("this version of NomicBert is not supported", "versions 1 and 1.5 are")
    return encoder_sizes(gguf) | {
        "architectures": ["NomicBertModel"],
        "qkv_proj_bias": gguf.has_tensor("blk.0.attn_qkv.bias"),
        "mlp_fc1_bias": gguf.has_tensor("blk.0.ffn_up.bias"),
    }


def encoder_sizes(gguf: GGUFFields) -> Config:
    return {
        "intermediate_size": gguf.size("feed_forward_length"),
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "type_vocab_size": row_count(gguf, "token_types.weight") if gguf.has_tensor("token_types.weight") else 0,
    }


def gemma_embedding(gguf: GGUFFields) -> Config:
    return dense(gguf) | {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": head_size(gguf),
        "sliding_window": gguf.size("attention.sliding_window"),
        "layer_types": layer_types(gguf, 6),
        "rope_parameters": rope_by_kind(gguf, 10000.0),
        "num_hidden_layers": layer_count(gguf),
    }


def row_count(gguf: GGUFFields, tensor: str) -> int:
    entry = gguf.header.tensors.get(tensor)
    if entry is None or len(entry.shape) != 2:
        raise DamagedModel(f"{gguf.header.files[0]} contains no table {tensor}", "fetch the model again")
    return entry.shape[0]


def pooling_config(gguf: GGUFFields) -> Config:
    """Return the pooling for `arch.pooling`; {} if the file specifies none, as in chat models."""
    pooling_type = gguf.count("pooling_type", 0)
    if pooling_type == RANK_POOLING:
        raise UnsupportedModel("a reranking model is not supported", "use an embedding model")
    if pooling_type not in POOLING_TYPES:
        return {}
    return {
        POOLING: {
            "kind": POOLING_TYPES[pooling_type],
            "dense": [dense_layer(gguf, name) for name in DENSE_TENSORS if gguf.has_tensor(name)],
        }
    }


def dense_layer(gguf: GGUFFields, name: str) -> Config:
    columns = gguf.header.tensors[name].shape[-1]
    return {"columns": columns, "rows": row_count(gguf, name), "activation": "identity"}

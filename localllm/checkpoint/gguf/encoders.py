"""GGUF's embedders: BERT, NomicBert and EmbeddingGemma as their `config.json`; how any file says that its vectors
are pooled.

Sources: llama.cpp's `src/models/{bert,gemma-embedding}.cpp`, `conversion/bert.py`.
"""

from localllm.arch.pooling import POOLING
from localllm.checkpoint.gguf.fields import GGUFFields
from localllm.checkpoint.gguf.parts import Config, dense, head_size, layer_count, layer_types, rope_by_kind
from localllm.errors import DamagedModel, UnsupportedModel

KINDS = {1: "mean", 2: "cls", 3: "last"}  # of `pooling_type`; 0 says nothing
RANKS = 4
DENSE = ("dense_2.weight", "dense_3.weight")


def bert(gguf: GGUFFields) -> Config:
    """RoBERTas, too: their converter leaves out the positions that no token has."""
    return sizes(gguf) | {
        "architectures": ["BertModel"],
        "max_position_embeddings": rows(gguf, "position_embd.weight"),
        "hidden_act": "gelu",
    }


def nomic_bert(gguf: GGUFFields) -> Config:
    if gguf.flag("attention.causal", False) or not gguf.has("blk.0.ffn_gate.weight"):
        raise UnsupportedModel("this edition of NomicBert is not supported", "versions 1 and 1.5 are")
    return sizes(gguf) | {
        "architectures": ["NomicBertModel"],
        "qkv_proj_bias": gguf.has("blk.0.attn_qkv.bias"),
        "mlp_fc1_bias": gguf.has("blk.0.ffn_up.bias"),
    }


def sizes(gguf: GGUFFields) -> Config:
    return {
        "intermediate_size": gguf.size("feed_forward_length"),
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "type_vocab_size": rows(gguf, "token_types.weight") if gguf.has("token_types.weight") else 0,
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


def rows(gguf: GGUFFields, tensor: str) -> int:
    found = gguf.header.tensors.get(tensor)
    if found is None or len(found.shape) != 2:
        raise DamagedModel(f"{gguf.header.files[0]} holds no table {tensor}", "fetch the model again")
    return found.shape[0]


def pooling(gguf: GGUFFields) -> Config:
    """As `arch.pooling` reads it; {} where the file says nothing, as those of models for chats do."""
    kind = gguf.count("pooling_type", 0)
    if kind == RANKS:
        raise UnsupportedModel("a model that ranks pairs of texts is not supported", "use one that gives vectors")
    if kind not in KINDS:
        return {}
    return {POOLING: {"kind": KINDS[kind], "dense": [layer(gguf, name) for name in DENSE if gguf.has(name)]}}


def layer(gguf: GGUFFields, name: str) -> Config:
    columns = gguf.header.tensors[name].shape[-1]
    return {"columns": columns, "rows": rows(gguf, name), "activation": "identity"}

"""Encoders: BERT, RoBERTa and NomicBert, with post-norm LayerNorms with a bias and bidirectional attention."""

from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    EncoderConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormPlacement,
    RopeConfig,
)
from localllm.arch.families.shared import family
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import Rules, TensorLayout
from localllm.arch.parts import ACTIVATIONS, activation, layer_count, rope
from localllm.errors import DamagedModel, UnsupportedModel

POST_NORMS = NormPlacement(before_mixer=False, after_mixer=True, before_ffn=False, after_ffn=True)
EMBEDDINGS: Rules = (
    (r"^(bert|roberta)\.", ""),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),  # in the first checkpoints
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"^embeddings\.word_embeddings\.", "embed_tokens."),
    (r"^embeddings\.position_embeddings\.", "embed_positions."),
    (r"^embeddings\.token_type_embeddings\.", "embed_kinds."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "embed_norm."),
)
# Heads of the pretraining tasks are not used for embeddings.
PRETRAINING_HEADS = (r"((bert|roberta)\.)?(pooler|cls|lm_head|classifier)\..*", r"(.*\.)?embeddings\.position_ids")
BERT = TensorLayout(
    names=(
        *EMBEDDINGS,
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
        (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
        (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
        (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".after_mixer."),
        (r"\.intermediate\.dense\.", ".mlp.up_proj."),
        (r"\.output\.dense\.", ".mlp.down_proj."),
        (r"\.output\.LayerNorm\.", ".after_ffn."),
    ),
    unused=PRETRAINING_HEADS,
)
NOMIC = TensorLayout(
    names=(
        *EMBEDDINGS,
        (r"^encoder\.layers\.", "layers."),
        (r"\.(attn\.Wqkv|self_attn\.qkv_proj)\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        (r"\.(norm1|post_attention_layernorm)\.", ".after_mixer."),
        (r"\.(norm2|post_mlp_layernorm)\.", ".after_ffn."),
    ),
    unused=PRETRAINING_HEADS,
)
BERT_FIELDS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}


@family("BertModel", "BertForMaskedLM", layout=BERT, **BERT_FIELDS)
def bert(hf: ConfigFields) -> ModelConfig:
    return absolute_positions(hf, first=0)


@family("RobertaModel", "XLMRobertaModel", "CamembertModel", layout=BERT, pad_token_id=1, **BERT_FIELDS)
def roberta(hf: ConfigFields) -> ModelConfig:
    """RoBERTa: positions start behind the padding token's id."""
    return absolute_positions(hf, first=hf.count("pad_token_id") + 1)


def absolute_positions(hf: ConfigFields, *, first: int) -> ModelConfig:
    """Build an encoder with learned positions, and an MLP without a gate."""
    if hf.text("position_embedding_type", "absolute") != "absolute" or hf.flag("is_decoder"):
        raise UnsupportedModel("a BERT with relative positions or a decoder is not supported", "use another")
    positions = hf.size("max_position_embeddings")
    mlp = MLPConfig(hf.size("intermediate_size"), activation(hf), bias=True, gated=False)
    return encoder(hf, mixer(hf, rope=None, bias=True), mlp, positions=positions, first=first)


@family("NomicBertModel", layout=NOMIC, layer_norm_eps=1e-12, type_vocab_size=2)
def nomic(hf: ConfigFields) -> ModelConfig:
    """NomicBert, whose config.json names sizes like `transformers` 5, or like GPT-2, on which its authors based
    it.
    """
    hf = ConfigFields({**{new: hf.values[old] for new, old in NOMIC_NAMES.items() if hf.has(old)}, **hf.values})
    if hf.flag("prenorm") or hf.has("num_experts") or hf.flag("rotary_emb_interleaved"):
        raise UnsupportedModel("this version of NomicBert is not supported", "versions 1 and 1.5 are")
    activation_name = hf.text("activation_function", "swiglu")
    if hf.number("rotary_emb_fraction", 1.0) != 1 or activation_name not in ("swiglu", *ACTIVATIONS):
        raise UnsupportedModel("this version of NomicBert is not supported", "versions 1 and 1.5 are")
    heads = mixer(hf, rope=nomic_rope(hf), bias=hf.flag("qkv_proj_bias"))
    biased = hf.flag("mlp_fc1_bias") or hf.flag("mlp_fc2_bias")
    gated = activation_name == "swiglu"
    mlp = MLPConfig(hf.size("intermediate_size"), "silu" if gated else ACTIVATIONS[activation_name], biased, gated)
    return encoder(hf, heads, mlp, positions=0, first=0)


NOMIC_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}


def nomic_rope(hf: ConfigFields) -> RopeConfig:
    size = head_size(hf)
    if hf.has("rope_parameters"):
        return rope(hf, size)
    return RopeConfig(hf.number("rotary_emb_base", 1000.0), size)


def mixer(hf: ConfigFields, *, rope: RopeConfig | None, bias: bool) -> AttentionConfig:
    heads, size = hf.size("num_attention_heads"), head_size(hf)
    return AttentionConfig(heads, heads, size, rope, size**-0.5, qkv_bias=bias, out_bias=bias)


def head_size(hf: ConfigFields) -> int:
    heads, hidden = hf.size("num_attention_heads"), hf.size("hidden_size")
    if hidden % heads:
        raise DamagedModel(f"a hidden size of {hidden} is not divisible by {heads} heads", "fetch the model again")
    return hidden // heads


def encoder(
    hf: ConfigFields, mixer: AttentionConfig, mlp: MLPConfig, *, positions: int, first: int
) -> ModelConfig:
    max_len = hf.size("max_position_embeddings") - first
    if max_len < 1:
        raise DamagedModel("config.json leaves no position for a token", "fetch the model again")
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        layers=(LayerConfig(mixer, mlp, POST_NORMS),) * layer_count(hf),
        norm_eps=hf.number("layer_norm_eps"),
        tie_embeddings=False,
        max_context=max_len,
        norm="layer",
        encoder=EncoderConfig(
            positions=positions,
            first_position=first,
            token_types=hf.count("type_vocab_size"),
            embedding_norm=True,
            norms_of_sums=True,
            final_norm=False,
            norm_bias=True,
        ),
    )

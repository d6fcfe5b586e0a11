"""Gemma 2, 3 and 4: norms before and after both halves of a layer."""

from dataclasses import replace
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    EncoderConfig,
    ModelConfig,
    NormPlacement,
    PerLayerConfig,
    RouterConfig,
)
from localllm.arch.families.shared import SANDWICH, alternating, family
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import Rules, TensorLayout, layer_patterns
from localllm.arch.parts import (
    activation,
    attention,
    decoder,
    layer_count,
    layer_types,
    mlp,
    moe,
    rope,
)
from localllm.errors import DamagedModel, UnsupportedModel

GEMMA = replace(SANDWICH, norm_offset=1.0)
GEMMA_FIELDS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}
GEMMA3_FIELDS: dict[str, Any] = GEMMA_FIELDS | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
}


@family(
    "Gemma2ForCausalLM",
    layout=GEMMA,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    num_key_value_heads=4,
    **GEMMA_FIELDS,
)
def gemma2(hf: ConfigFields) -> ModelConfig:
    return gemma(hf, every=2, softcap=hf.number("attn_logit_softcapping", None))


@family("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", layout=GEMMA, **GEMMA3_FIELDS)
def gemma3(hf: ConfigFields) -> ModelConfig:
    return gemma(hf, every=hf.size("sliding_window_pattern"), qk_norm="per_head")


@family("Gemma3TextModel", layout=GEMMA, **GEMMA3_FIELDS)
def gemma3_text(hf: ConfigFields) -> ModelConfig:
    """EmbeddingGemma; if it is bidirectional, config.json gives the total window of both directions."""
    bidirectional = hf.flag("use_bidirectional_attention")
    window = hf.size("sliding_window")
    changes = {
        "use_bidirectional_attention": False,
        "sliding_window": window // 2 + 1 if bidirectional else window,
    }
    model = gemma3(ConfigFields({**hf.values, **changes}))
    return replace(model, encoder=EncoderConfig(causal=not bidirectional), tie_embeddings=False)


def gemma(hf: ConfigFields, *, every: int, **changes: Any) -> ModelConfig:
    if hf.flag("use_bidirectional_attention"):
        raise UnsupportedModel("a bidirectional model is not supported", "use one that generates text")
    bias = hf.flag("attention_bias")
    scale = hf.number("query_pre_attn_scalar") ** -0.5
    return decoder(
        hf,
        alternating(hf, every=every, scale=scale, qkv_bias=bias, out_bias=bias, **changes),
        mlp(hf),
        norms=NormPlacement(True, True, True, True),
        embedding_scale=hf.size("hidden_size") ** 0.5,
        logit_softcap=hf.number("final_logit_softcapping", None),
    )


def gemma4_layout(hf: ConfigFields) -> TensorLayout:
    """Return Gemma 4's layout.

    Layers that read other layers' keys and values may store unused ones. With experts, the layer's feed-forward
    norms and MLP belong to the shared expert.
    """
    first = layer_count(hf) - hf.count("num_kv_shared_layers")
    unused = layer_patterns(range(max(first, 0), layer_count(hf)), r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")
    mixture: Rules = (
        (r"\.pre_feedforward_layernorm\.", ".mlp.before_shared."),
        (r"\.post_feedforward_layernorm_1\.", ".mlp.after_shared."),
        (r"\.pre_feedforward_layernorm_2\.", ".mlp.before_experts."),
        (r"\.post_feedforward_layernorm_2\.", ".mlp.after_experts."),
        (r"\.mlp\.(gate|up|down)_proj\.", r".mlp.shared.\1_proj."),
        (r"\.experts\.", ".mlp.experts."),
        (r"\.router\.proj\.", ".mlp.router."),
        (r"\.router\.scale$", ".mlp.before_router.weight"),
        (r"\.router\.per_expert_scale$", ".mlp.expert_scale"),
    )
    return TensorLayout(names=(*(mixture if hf.flag("enable_moe_block") else ()), *SANDWICH.names), unused=unused)


@family(
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    layout=gemma4_layout,
    vocab_size=262144,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    sliding_window=512,
    vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256,
    num_kv_shared_layers=0,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
)
def gemma4(hf: ConfigFields) -> ModelConfig:
    if hf.text("use_bidirectional_attention", "vision") != "vision":
        raise UnsupportedModel("a bidirectional text model is not supported", "use one that generates text")
    mixers = gemma4_mixers(hf)
    narrow = mlp(hf)
    wide = replace(
        narrow, intermediate_size=narrow.intermediate_size * (2 if hf.flag("use_double_wide_mlp") else 1)
    )
    ffns: list[Any] = [narrow if mixer.kv_source is None else wide for mixer in mixers]
    has_experts = hf.flag("enable_moe_block")
    if has_experts:
        router = RouterConfig(normed=True, expert_scale=True)
        experts = moe(
            hf,
            hf.size("num_experts"),
            router,
            size_field="moe_intermediate_size",
            count_field="top_k_experts",
            apart=True,
        )
        ffns = [replace(experts, shared=ffn) for ffn in ffns]
    dim = hf.count("hidden_size_per_layer_input")
    if dim and hf.size("vocab_size_per_layer_input") < hf.size("vocab_size"):
        raise DamagedModel("config.json has tokens without a per-layer embedding", "fetch the model again")
    return decoder(
        hf,
        mixers,
        ffns,
        norms=NormPlacement(True, True, not has_experts, True),
        output_scale=True,
        embedding_scale=hf.size("hidden_size") ** 0.5,
        logit_softcap=hf.number("final_logit_softcapping", None),
        per_layer=PerLayerConfig(hf.size("vocab_size_per_layer_input"), dim, activation(hf)) if dim else None,
    )


def gemma4_mixers(hf: ConfigFields) -> list[AttentionConfig]:
    """Return the mixers: sliding and full layers differ in rope, head size and number of key-value heads.

    The last layers read the keys and values of the last layer of their type before them.
    """
    count = layer_count(hf)
    types = layer_types(hf) or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    types = [*types[:-1], "full_attention"]  # as in transformers
    first_shared = count - hf.count("num_kv_shared_layers")
    last_own = {layer_type: i for i, layer_type in enumerate(types[: max(first_shared, 0)])}
    if not last_own.keys() >= set(types):
        raise DamagedModel("config.json shares keys and values that no layer computes", "fetch the model again")
    mixers = []
    for i, layer_type in enumerate(types):
        layer_fields = gemma4_layer_fields(hf, i, layer_type)
        layer_rope, bias = (
            rope(layer_fields, layer_fields.size("head_dim"), layer_type=layer_type),
            hf.flag("attention_bias"),
        )
        mixer = attention(
            layer_fields, rope=layer_rope, scale=1.0, qk_norm="per_head", qkv_bias=bias, out_bias=bias
        )
        mixer = replace(mixer, value_norm=True)
        if layer_type == "sliding_attention":
            mixer = replace(mixer, window=hf.size("sliding_window"))
        elif hf.flag("attention_k_eq_v"):
            mixer = replace(mixer, keys_as_values=True)
        mixers.append(replace(mixer, kv_source=last_own[layer_type]) if i >= first_shared else mixer)
    return mixers


def gemma4_layer_fields(hf: ConfigFields, index: int, layer_type: str) -> ConfigFields:
    """Return the fields with a layer's overrides, from `per_layer_config` or the fields for full layers."""
    if hf.has("per_layer_config"):
        layers = hf.section("per_layer_config")  # newer versions of transformers write 05 for 5
        name = next((name for name in layers.values if name.isdecimal() and int(name) == index), str(index))
        sizes = layers.section(name).values
    elif layer_type == "full_attention":
        heads = hf.values.get("num_global_key_value_heads") if hf.flag("attention_k_eq_v") else None
        sizes = {"head_dim": hf.size("global_head_dim")} | ({"num_key_value_heads": heads} if heads else {})
    else:
        sizes = {}
    if not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(
            f"layer {index} differs in {', '.join(sizes)}", "only head_dim and num_key_value_heads may differ"
        )
    return ConfigFields({**hf.values, **sizes})

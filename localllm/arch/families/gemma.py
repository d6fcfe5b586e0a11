"""Gemma 2, 3 and 4: norms around both halves of a layer."""

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
from localllm.arch.families.registry import family
from localllm.arch.families.shared import SANDWICH, alternating
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
    """EmbeddingGemma: where it looks ahead, config.json counts its window in both directions together."""
    around = hf.flag("use_bidirectional_attention")
    window = hf.size("sliding_window")
    seen = {"use_bidirectional_attention": False, "sliding_window": window // 2 + 1 if around else window}
    found = gemma3(ConfigFields({**hf.values, **seen}))
    return replace(found, encoder=EncoderConfig(causal=not around), tie_embeddings=False)


def gemma(hf: ConfigFields, *, every: int, **changes: Any) -> ModelConfig:
    if hf.flag("use_bidirectional_attention"):
        raise UnsupportedModel("a model that looks ahead is not supported", "use one that generates text")
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
    """Layers that read the keys and values of others may store unused ones. With experts, the norms and the MLP of
    what else is the feed-forward half are those of the shared expert."""
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
        raise UnsupportedModel("a text model that looks ahead is not supported", "use one that generates text")
    mixers = gemma4_mixers(hf)
    plain = mlp(hf)
    wide = replace(plain, intermediate_size=plain.intermediate_size * (2 if hf.flag("use_double_wide_mlp") else 1))
    ffns: list[Any] = [plain if mixer.kv_source is None else wide for mixer in mixers]
    mixture = hf.flag("enable_moe_block")
    if mixture:
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
        norms=NormPlacement(True, True, not mixture, True),
        output_scale=True,
        embedding_scale=hf.size("hidden_size") ** 0.5,
        logit_softcap=hf.number("final_logit_softcapping", None),
        per_layer=PerLayerConfig(hf.size("vocab_size_per_layer_input"), dim, activation(hf)) if dim else None,
    )


def gemma4_mixers(hf: ConfigFields) -> list[AttentionConfig]:
    """Sliding and full layers differ in rope, in the size of heads and in how many keys and values have. The last
    layers read the keys and values of the last before them of their kind."""
    count = layer_count(hf)
    kinds = layer_types(hf) or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    kinds = [*kinds[:-1], "full_attention"]  # as transformers has it
    first_shared = count - hf.count("num_kv_shared_layers")
    last_own = {kind: i for i, kind in enumerate(kinds[: max(first_shared, 0)])}
    if not last_own.keys() >= set(kinds):
        raise DamagedModel("config.json shares keys and values that no layer makes", "fetch the model again")
    mixers = []
    for i, kind in enumerate(kinds):
        own = gemma4_layer_fields(hf, i, kind)
        turn, bias = rope(own, own.size("head_dim"), layer_type=kind), hf.flag("attention_bias")
        mixer = attention(own, rope=turn, scale=1.0, qk_norm="per_head", qkv_bias=bias, out_bias=bias)
        mixer = replace(mixer, value_norm=True)
        if kind == "sliding_attention":
            mixer = replace(mixer, window=hf.size("sliding_window"))
        elif hf.flag("attention_k_eq_v"):
            mixer = replace(mixer, keys_as_values=True)
        mixers.append(replace(mixer, kv_source=last_own[kind]) if i >= first_shared else mixer)
    return mixers


def gemma4_layer_fields(hf: ConfigFields, index: int, layer_type: str) -> ConfigFields:
    """What a layer has instead of the model's own: by `per_layer_config`, else by the fields for full layers."""
    if hf.has("per_layer_config"):
        sizes = hf.section("per_layer_config").section(str(index)).values
    elif layer_type == "full_attention":
        heads = hf.values.get("num_global_key_value_heads") if hf.flag("attention_k_eq_v") else None
        sizes = {"head_dim": hf.size("global_head_dim")} | ({"num_key_value_heads": heads} if heads else {})
    else:
        sizes = {}
    if not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(
            f"layer {index} differs in {', '.join(sizes)}", "only the sizes of heads may differ"
        )
    return ConfigFields({**hf.values, **sizes})

"""Dense decoders: Llama, Mistral, Qwen, Phi, SmolLM, Granite, OLMo, GLM-4, Command R."""

from dataclasses import replace

from localllm.arch.config import (
    LongScaling,
    ModelConfig,
    NormPlacement,
    QueryScaling,
    RopeConfig,
)
from localllm.arch.families.shared import SANDWICH, alternating, family, qwen3_mixer, qwen_windows
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout
from localllm.arch.parts import (
    attention,
    check_per_layer,
    decoder,
    layer_count,
    layer_types,
    mlp,
    rope_fields,
)
from localllm.errors import DamagedModel

GLM4 = TensorLayout(
    names=(
        (r"\.input_layernorm\.", ".before_mixer."),
        (r"\.post_self_attn_layernorm\.", ".after_mixer."),
        (r"\.post_attention_layernorm\.", ".before_ffn."),
        (r"\.post_mlp_layernorm\.", ".after_ffn."),
    )
)


@family("LlamaForCausalLM")
def llama(hf: ConfigFields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixer = attention(hf, qkv_bias=bias, out_bias=bias)
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf, bias=hf.flag("mlp_bias")))


@family(
    "MistralForCausalLM",
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=131072,
    sliding_window=4096,
)
def mistral(hf: ConfigFields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf))


@family("MinistralForCausalLM", num_key_value_heads=8)
def ministral(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, alternating(hf, every=layer_count(hf) + 1), mlp(hf))


@family("Ministral3ForCausalLM", num_key_value_heads=8)
def ministral3(hf: ConfigFields) -> ModelConfig:
    ropes = rope_fields(hf)
    if not ropes.values:
        raise DamagedModel("config.json lacks rope_parameters", "fetch the model again")
    beta = ropes.number("llama_4_scaling_beta", None)
    growth = QueryScaling(beta, ropes.size("original_max_position_embeddings")) if beta else None
    mixer = attention(hf, window=hf.size("sliding_window", None), query_growth=growth)
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf))


@family("Qwen2ForCausalLM", max_window_layers=28)
def qwen2(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, [attention(hf, window=window, qkv_bias=True) for window in qwen_windows(hf)], mlp(hf))


@family("Qwen3ForCausalLM", max_window_layers=28)
def qwen3(hf: ConfigFields) -> ModelConfig:
    return decoder(hf, [replace(qwen3_mixer(hf), window=window) for window in qwen_windows(hf)], mlp(hf))


@family("Phi3ForCausalLM")
def phi3(hf: ConfigFields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    scaling = mixer.rope.scaling if mixer.rope else None
    default_context = scaling.original_context if isinstance(scaling, LongScaling) else None
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf), default_context=default_context)


@family(
    "SmolLM3ForCausalLM",
    tie_word_embeddings=True,
    no_rope_layer_interval=4,
    num_key_value_heads=4,
    rope_theta=2e6,
)
def smollm3(hf: ConfigFields) -> ModelConfig:
    every = hf.size("no_rope_layer_interval")
    uses_rope = hf.flags("no_rope_layers") or [(i + 1) % every != 0 for i in range(layer_count(hf))]
    check_per_layer(hf, "no_rope_layers", uses_rope, (True, False))
    windowed = hf.flag("use_sliding_window") and hf.has("sliding_window")
    types = layer_types(hf) or [
        "sliding_attention" if windowed and not rotated else "full_attention" for rotated in uses_rope
    ]
    bias = hf.flag("attention_bias")
    with_rope = attention(hf, qkv_bias=bias, out_bias=bias)
    mixers = [
        replace(
            with_rope,
            window=hf.size("sliding_window") if layer_type == "sliding_attention" else None,
            rope=with_rope.rope if rotated else None,
        )
        for rotated, layer_type in zip(uses_rope, types, strict=True)
    ]
    return decoder(hf, mixers, mlp(hf, bias=hf.flag("mlp_bias")))


@family("GraniteForCausalLM", embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0)
def granite(hf: ConfigFields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixer = attention(hf, qkv_bias=bias, out_bias=bias, scale=hf.number("attention_multiplier", 1.0))
    return decoder(
        hf,
        [mixer] * layer_count(hf),
        mlp(hf, bias=hf.flag("mlp_bias")),
        residual_scale=hf.number("residual_multiplier"),
        embedding_scale=hf.number("embedding_multiplier"),
        logit_scale=1 / hf.number("logits_scaling"),
    )


@family("Olmo2ForCausalLM", layout=SANDWICH)
def olmo2(hf: ConfigFields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixers = [attention(hf, qk_norm="whole", qkv_bias=bias, out_bias=bias)] * layer_count(hf)
    return decoder(hf, mixers, mlp(hf), norms=NormPlacement(False, True, False, True))


@family("Olmo3ForCausalLM", layout=SANDWICH, rope_theta=500000.0)
def olmo3(hf: ConfigFields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixers = alternating(hf, every=4, qk_norm="whole", qkv_bias=bias, out_bias=bias)
    if hf.has("rope_scaling"):
        unscaled = RopeConfig(hf.number("rope_theta"), mixers[0].head_dim)
        mixers = [replace(mixer, rope=unscaled) if mixer.window else mixer for mixer in mixers]
    return decoder(hf, mixers, mlp(hf), norms=NormPlacement(False, True, False, True))


@family("Glm4ForCausalLM", layout=GLM4, partial_rotary_factor=0.5, num_key_value_heads=2, attention_bias=True)
def glm4(hf: ConfigFields) -> ModelConfig:
    mixer = attention(hf, interleaved=True, qkv_bias=hf.flag("attention_bias"))
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf), norms=NormPlacement(True, True, True, True))


@family("Cohere2ForCausalLM", tie_word_embeddings=True, logit_scale=0.0625, layer_norm_eps=1e-5)
def cohere2(hf: ConfigFields) -> ModelConfig:
    every = hf.size("sliding_window_pattern", 4)
    bias = hf.flag("attention_bias")
    mixers = alternating(hf, every=every, interleaved=True, qkv_bias=bias, out_bias=bias)
    return decoder(
        hf,
        [mixer if mixer.window else replace(mixer, rope=None) for mixer in mixers],
        mlp(hf),
        parallel=True,
        norms=NormPlacement(before_ffn=False),
        norm="layer",
        norm_eps=hf.number("layer_norm_eps"),
        logit_scale=hf.number("logit_scale"),
    )

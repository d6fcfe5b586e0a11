"""Families with another placement of norms: OLMo, GLM-4, Command R."""

from dataclasses import replace

from localllm.arch.config import (
    ModelConfig,
    NormPlacement,
    RopeConfig,
)
from localllm.arch.families.shared import SANDWICH, alternating, family
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout
from localllm.arch.parts import (
    attention,
    decoder,
    layer_count,
    mlp,
)

GLM4 = TensorLayout(
    names=(
        (r"\.input_layernorm\.", ".before_mixer."),
        (r"\.post_self_attn_layernorm\.", ".after_mixer."),
        (r"\.post_attention_layernorm\.", ".before_ffn."),
        (r"\.post_mlp_layernorm\.", ".after_ffn."),
    )
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

"""One short function a family: a checkpoint's `config.json` -> ModelConfig.

Nothing after this file asks for a family's name. A new family is a function here and a row in
`tests/models/test_families.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from localllm.arch.fields import Fields
from localllm.errors import DamagedModel, UnsupportedModel

Describe = Callable[[Fields], ModelConfig]

MOST_LAYERS = 10_000

FAMILIES: dict[str, Describe] = {}


def family(architecture: str) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        FAMILIES[architecture] = describe
        return describe

    return register


def describe(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` names.

    Raises UnsupportedModel for a family, activation or rope that does not run here, and DamagedModel where a
    field is missing or makes no sense.
    """
    hf = Fields(config)
    name = next(iter(hf.texts("architectures")), "none")
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"the family {name!r} is not supported", f"these are: {', '.join(sorted(FAMILIES))}"
        )
    activation = hf.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"the activation {activation!r} is not supported", "silu is")
    return FAMILIES[name](hf)


# --- shared pieces: what most families have in common ---


def rope(hf: Fields, head_dim: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    if head_dim % 2:
        raise DamagedModel(f"a head of {head_dim} values cannot be rotated in pairs", "fetch the model again")
    if hf.has("rope_parameters"):
        fields = hf.part("rope_parameters")
        return RopeConfig(fields.number("rope_theta"), head_dim, scaling(fields))
    return RopeConfig(hf.number("rope_theta", 10000.0), head_dim, scaling(hf.part("rope_scaling")))


def scaling(fields: Fields) -> Llama3Scaling | LinearScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_context=fields.size("original_max_position_embeddings"),
        )
    raise UnsupportedModel(f"the rope scaling {kind!r} is not supported", "default, linear and llama3 are")


def attention(
    hf: Fields,
    *,
    window: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> AttentionConfig:
    heads = hf.size("num_attention_heads")
    kv_heads = hf.size("num_key_value_heads", None) or heads
    head_dim = hf.size("head_dim", None) or hf.size("hidden_size") // heads
    if heads % kv_heads:
        raise DamagedModel(f"{heads} query heads cannot share {kv_heads} key-value heads", "fetch the model again")
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope(hf, head_dim),
        scale=head_dim**-0.5,
        window=window,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def layer_count(hf: Fields) -> int:
    layers = hf.size("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise DamagedModel(f"config.json names {layers} layers", "fetch the model again")
    return layers


def windows(hf: Fields) -> list[int | None]:
    """Each layer's sliding window: by `layer_types`, else by Qwen's `max_window_layers`."""
    layers = layer_count(hf)
    if not hf.flag("use_sliding_window"):
        return [None] * layers
    kinds = hf.texts("layer_types") or [
        "sliding_attention" if i >= hf.size("max_window_layers") else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers:
        raise DamagedModel(
            f"config.json has {len(kinds)} layer_types for {layers} layers", "fetch the model again"
        )
    return [hf.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds]


def decoder(hf: Fields, mixers: list[AttentionConfig], ffn: MLPConfig) -> ModelConfig:
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        layers=tuple(LayerConfig(mixer, ffn) for mixer in mixers),
        norm_eps=hf.number("rms_norm_eps"),
        tie_embeddings=hf.flag("tie_word_embeddings"),
        max_context=hf.size("max_position_embeddings"),
        eos_ids=hf.token_ids("eos_token_id"),
    )


# --- the families ---


@family("LlamaForCausalLM")
def llama(hf: Fields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixer = attention(hf, qkv_bias=bias, out_bias=bias)
    mlp = MLPConfig(hf.size("intermediate_size"), bias=hf.flag("mlp_bias"))
    return decoder(hf, [mixer] * layer_count(hf), mlp)


@family("MistralForCausalLM")
def mistral(hf: Fields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    return decoder(hf, [mixer] * layer_count(hf), MLPConfig(hf.size("intermediate_size")))


@family("Qwen2ForCausalLM")
def qwen2(hf: Fields) -> ModelConfig:
    mixers = [attention(hf, window=window, qkv_bias=True) for window in windows(hf)]
    return decoder(hf, mixers, MLPConfig(hf.size("intermediate_size")))


@family("Qwen3ForCausalLM")
def qwen3(hf: Fields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixers = [attention(hf, window=window, qk_norm=True, qkv_bias=bias, out_bias=bias) for window in windows(hf)]
    return decoder(hf, mixers, MLPConfig(hf.size("intermediate_size")))

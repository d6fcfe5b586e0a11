"""Parts that most families share: rope, attention, feed-forward and the decoder, parsed from `config.json`."""

import math
from collections.abc import Sequence
from typing import Any

from localllm.arch.config import (
    Activation,
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    PerFrequencyScaling,
    ProportionalScaling,
    RopeConfig,
    RouterConfig,
    Scaling,
    YarnScaling,
)
from localllm.arch.fields import ConfigFields
from localllm.errors import DamagedModel, UnsupportedModel

MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def activation(hf: ConfigFields) -> Activation:
    name = hf.text("hidden_activation", hf.text("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"the activation {name!r} is not supported", f"these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def mlp(hf: ConfigFields, **changes: Any) -> MLPConfig:
    return MLPConfig(hf.size("intermediate_size"), activation(hf), **changes)


def moe(
    hf: ConfigFields,
    experts: int,
    router: RouterConfig,
    *,
    size_field: str,
    count_field: str = "num_experts_per_tok",
    **changes: Any,
) -> MoEConfig:
    """Parse a mixture of experts.

    size_field, count_field: names of the fields with an expert's intermediate size and the experts per token.
    """
    count = hf.size(count_field)
    if not count <= experts <= MAX_EXPERTS:
        raise DamagedModel(f"config.json selects {count} of {experts} experts", "fetch the model again")
    if experts % router.groups or not router.chosen_groups <= router.groups:
        raise DamagedModel(f"{experts} experts do not form {router.groups} groups", "fetch the model again")
    if count > experts // router.groups * router.chosen_groups:
        raise DamagedModel(
            f"{router.chosen_groups} of {router.groups} groups contain fewer than {count} experts",
            "fetch the model again",
        )
    return MoEConfig(experts, count, MLPConfig(hf.size(size_field), activation(hf)), router, **changes)


def sigmoid_router(hf: ConfigFields) -> RouterConfig:
    """Return the router of DeepSeek-V3."""
    return RouterConfig(
        score="sigmoid",
        normalize=hf.flag("norm_topk_prob"),
        correction=True,
        groups=hf.size("n_group", 1),
        chosen_groups=hf.size("topk_group", 1),
        scale=hf.number("routed_scaling_factor", 1.0),
    )


def sparse_after_dense(hf: ConfigFields, experts: MoEConfig) -> list[MLPConfig | MoEConfig]:
    """Return dense MLPs for the first layers, by `mlp_layer_types` or `first_k_dense_replace`, and experts for
    the rest.
    """
    types = hf.texts("mlp_layer_types")
    dense = hf.count("first_k_dense_replace", 0)
    types = types or ["dense" if i < dense else "sparse" for i in range(layer_count(hf))]
    check_per_layer(hf, "mlp_layer_types", types, ("dense", "sparse"))
    return [mlp(hf) if layer_type == "dense" else experts for layer_type in types]


def rope_fields(hf: ConfigFields) -> ConfigFields:
    """Return `rope_parameters` (transformers 5) or the older `rope_scaling`; empty if both are missing."""
    return hf.section("rope_parameters" if hf.has("rope_parameters") else "rope_scaling")


def rope(
    hf: ConfigFields, head_dim: int, *, layer_type: str | None = None, interleaved: bool = False
) -> RopeConfig:
    """Parse `rope_fields`, which may be per layer type, and `rope_theta`."""
    fields = rope_fields(hf)
    if layer_type is not None and fields.has(layer_type):
        fields = fields.section(layer_type)
    theta = fields.number("rope_theta", hf.number("rope_theta", 10000.0))
    share = fields.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    # Rotates a share of the entire head's pairs.
    is_proportional = fields.text("rope_type", "default") == "proportional"
    dim = head_dim if is_proportional and share <= 1 else int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise DamagedModel(
            f"{dim} of a head's {head_dim} dimensions cannot be rotated in pairs", "fetch the model again"
        )
    if theta <= 1:
        raise DamagedModel(f"rope_theta in config.json is {theta}, not above 1", "fetch the model again")
    return RopeConfig(theta, dim, rope_scaling(hf, fields, dim, share), interleaved)


def rope_scaling(hf: ConfigFields, fields: ConfigFields, dim: int, share: float) -> Scaling | None:
    scaling_type = fields.text("rope_type", fields.text("type", "default"))
    match scaling_type:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_context=fields.size("original_max_position_embeddings"),
            )
        case "yarn":
            return yarn(hf, fields)
        case "longrope" | "su":
            return longrope(hf, fields, dim)
        case "proportional":
            return ProportionalScaling(int(share * dim // 2), fields.number("factor", 1.0))
        case "divided":
            return PerFrequencyScaling(divisors(fields, "divisors", dim))
    supported = "default, linear, llama3, yarn, longrope and proportional are"
    raise UnsupportedModel(f"the rope scaling {scaling_type!r} is not supported", supported)


def yarn(hf: ConfigFields, fields: ConfigFields) -> YarnScaling:
    original = fields.size("original_max_position_embeddings")
    factor = fields.number("factor", hf.size("max_position_embeddings") / original)
    scale, all_dim = fields.number("mscale", None), fields.number("mscale_all_dim", None)
    inferred = yarn_magnitude(factor, scale) / yarn_magnitude(factor, all_dim) if scale and all_dim else None
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        magnitude=fields.number("attention_factor", inferred or yarn_magnitude(factor)),
        truncate=fields.flag("truncate", True),
    )


def yarn_magnitude(factor: float, scale: float | None = 1.0) -> float:
    """0.1 s ln(factor) + 1 (Peng et al. 2023, section 3.4)"""
    return 0.1 * (scale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope(hf: ConfigFields, fields: ConfigFields, dim: int) -> LongScaling:
    original = hf.size("original_max_position_embeddings", None) or fields.size("original_max_position_embeddings")
    factor = fields.number("factor", hf.size("max_position_embeddings") / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongScaling(
        short=divisors(fields, "short_factor", dim),
        long=divisors(fields, "long_factor", dim),
        original_context=original,
        magnitude=fields.number("attention_factor", inferred),
    )


def divisors(fields: ConfigFields, name: str, dim: int) -> tuple[float, ...]:
    values = fields.numbers(name)
    if len(values) != dim // 2:
        raise DamagedModel(f"{name} has {len(values)} values for {dim // 2} frequencies", "fetch the model again")
    return values


def attention(hf: ConfigFields, *, interleaved: bool = False, **changes: Any) -> AttentionConfig:
    heads = hf.size("num_attention_heads")
    kv_heads = hf.size("num_key_value_heads", None) or heads
    head_dim = hf.size("head_dim", None) or hf.size("hidden_size") // heads
    if heads % kv_heads:
        raise DamagedModel(f"{heads} query heads cannot share {kv_heads} key-value heads", "fetch the model again")
    if "rope" not in changes:
        changes["rope"] = rope(hf, head_dim, interleaved=interleaved)
    return AttentionConfig(heads, kv_heads, head_dim, **{"scale": head_dim**-0.5, **changes})


def delta_net(hf: ConfigFields) -> DeltaNetConfig:
    if activation(hf) != "silu":
        raise UnsupportedModel(
            "a delta net with an activation other than silu is not supported", "use a published model"
        )
    keys, values = hf.size("linear_num_key_heads"), hf.size("linear_num_value_heads")
    if values % keys:
        raise DamagedModel(f"{values} value heads cannot share {keys} key heads", "fetch the model again")
    return DeltaNetConfig(
        key_heads=keys,
        value_heads=values,
        key_dim=hf.size("linear_key_head_dim"),
        value_dim=hf.size("linear_value_head_dim"),
        kernel_size=hf.size("linear_conv_kernel_dim"),
        tiled=hf.flag("linear_value_heads_tiled"),
    )


def latent_attention(hf: ConfigFields) -> LatentConfig:
    """Parse DeepSeek's latent attention. With YaRN, the scale includes the magnitude of both q and k."""
    nope, rope_dim = hf.size("qk_nope_head_dim"), hf.size("qk_rope_head_dim")
    rope_config = rope(hf, rope_dim, interleaved=hf.flag("rope_interleave"))
    all_dim = rope_fields(hf).number("mscale_all_dim", None)
    scale = (nope + rope_dim) ** -0.5
    if all_dim and isinstance(rope_config.scaling, YarnScaling):
        scale *= yarn_magnitude(rope_config.scaling.factor, all_dim) ** 2
    return LatentConfig(
        heads=hf.size("num_attention_heads"),
        q_lora_rank=hf.size("q_lora_rank", None),
        kv_lora_rank=hf.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=hf.size("v_head_dim"),
        rope=rope_config,
        scale=scale,
        norm_eps=1e-6,  # transformers ignores rms_norm_eps here
        bias=hf.flag("attention_bias"),
    )


def layer_count(hf: ConfigFields) -> int:
    layers = hf.size("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise DamagedModel(f"config.json specifies {layers} layers", "fetch the model again")
    return layers


def layer_types(hf: ConfigFields, known: tuple[str, ...] = ("full_attention", "sliding_attention")) -> list[str]:
    """Return each layer's type according to `layer_types`; empty if the field is missing."""
    types = hf.texts("layer_types")
    if types:
        check_per_layer(hf, "layer_types", types, known)
    return types


def check_per_layer(hf: ConfigFields, name: str, values: list[Any], known: tuple[Any, ...]) -> None:
    """Raise DamagedModel unless there is one value per layer, and UnsupportedModel for an unsupported value."""
    if len(values) != layer_count(hf):
        raise DamagedModel(
            f"config.json has {len(values)} {name} for {layer_count(hf)} layers", "fetch the model again"
        )
    if unsupported := next((value for value in values if value not in known), None):
        raise UnsupportedModel(
            f"layers of type {unsupported!r} are not supported in this family", f"these are: {', '.join(known)}"
        )


def decoder(
    hf: ConfigFields,
    mixers: Sequence[Mixer],
    ffn: MLPConfig | MoEConfig | Sequence[Any],
    **changes: Any,
) -> ModelConfig:
    """Build a decoder. ffn: one for all layers or one per layer; changes: fields of the layers or of the model."""
    layers, layer_fields = layer_count(hf), LayerConfig.__dataclass_fields__
    layer_changes = {name: changes.pop(name) for name in [*changes] if name in layer_fields}
    ffns = [ffn] * layers if isinstance(ffn, MLPConfig | MoEConfig) else ffn
    common = {
        "norm_eps": changes.pop("norm_eps", None) or hf.number("rms_norm_eps"),
        "tie_embeddings": hf.flag("tie_word_embeddings"),
        "max_context": hf.size("max_position_embeddings"),
        "eos_ids": hf.ids("eos_token_id"),
    }
    return ModelConfig(
        vocab_size=hf.size("vocab_size"),
        hidden_size=hf.size("hidden_size"),
        layers=tuple(LayerConfig(m, f, **layer_changes) for m, f in zip(mixers, ffns, strict=True)),
        **{**common, **changes},
    )

"""One short function a family: a checkpoint's `config.json` as a dict -> ModelConfig.

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
from localllm.errors import DamagedModel, UnsupportedModel

HF = Mapping[str, Any]
Describe = Callable[[HF], ModelConfig]

FAMILIES: dict[str, Describe] = {}


def family(architecture: str) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        FAMILIES[architecture] = describe
        return describe

    return register


def describe(hf: HF) -> ModelConfig:
    """The model that a `config.json` names.

    Raises UnsupportedModel for a family, activation or rope that does not run here, and DamagedModel where a
    field is missing or makes no sense.
    """
    name = (hf.get("architectures") or ["none"])[0]
    if name not in FAMILIES:
        raise UnsupportedModel(f"the family {name} is not supported", f"these are: {', '.join(sorted(FAMILIES))}")
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"the activation {hf['hidden_act']!r} is not supported", "silu is")
    try:
        config = FAMILIES[name](hf)
    except KeyError as missing:
        raise DamagedModel(f"config.json lacks {missing}", "fetch the model again") from None
    except TypeError as wrong:
        raise DamagedModel(f"config.json holds a value of the wrong type ({wrong})", "fetch it again") from None
    check(config)
    return config


def check(config: ModelConfig) -> None:
    """Sizes that no tensor could have are the file's fault and named here, before anything is read."""
    for layer in config.layers:
        m = layer.mixer
        sizes = (config.vocab_size, config.hidden_size, config.max_context, m.heads, m.kv_heads, m.head_dim)
        if not all(isinstance(n, int) and n > 0 for n in (*sizes, layer.ffn.intermediate_size)):
            raise DamagedModel("config.json holds a size that is not a positive number", "fetch it again")
        if m.heads % m.kv_heads:
            raise DamagedModel(
                f"{m.heads} query heads cannot share {m.kv_heads} key-value heads", "fetch the model again"
            )
        if m.rope.dim % 2:
            raise DamagedModel(f"a head of {m.rope.dim} values cannot be rotated in pairs", "fetch it again")
    if not config.layers:
        raise DamagedModel("config.json names no layers", "fetch the model again")


# --- shared pieces: what most families have in common ---


def rope(hf: HF, head_dim: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    fields = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000.0)} | (
        hf.get("rope_scaling") or {}
    )
    return RopeConfig(float(fields["rope_theta"]), head_dim, scaling(fields))


def scaling(fields: HF) -> Llama3Scaling | LinearScaling | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            fields["factor"],
            fields["low_freq_factor"],
            fields["high_freq_factor"],
            fields["original_max_position_embeddings"],
        )
    raise UnsupportedModel(f"the rope scaling {kind!r} is not supported", "default, linear and llama3 are")


def attention(hf: HF, **changes: Any) -> AttentionConfig:
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    fields: dict[str, Any] = {
        "heads": hf["num_attention_heads"],
        "kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_dim": head_dim,
        "rope": rope(hf, head_dim),
        "scale": head_dim**-0.5,
    }
    return AttentionConfig(**fields | changes)


def windows(hf: HF) -> list[int | None]:
    """Each layer's sliding window: by `layer_types`, else by Qwen's `max_window_layers`."""
    layers = hf["num_hidden_layers"]
    if not hf.get("use_sliding_window"):
        return [None] * layers
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= hf["max_window_layers"] else "full_attention" for i in range(layers)
    ]
    return [hf["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def decoder(hf: HF, mixers: list[AttentionConfig], ffn: MLPConfig) -> ModelConfig:
    eos = hf.get("eos_token_id")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        layers=tuple(LayerConfig(mixer, ffn) for mixer in mixers),
        norm_eps=hf["rms_norm_eps"],
        tie_embeddings=bool(hf.get("tie_word_embeddings")),
        max_context=hf["max_position_embeddings"],
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


# --- the families ---


@family("LlamaForCausalLM")
def llama(hf: HF) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    mixer = attention(hf, qkv_bias=bias, out_bias=bias)
    mlp = MLPConfig(hf["intermediate_size"], bias=bool(hf.get("mlp_bias")))
    return decoder(hf, [mixer] * hf["num_hidden_layers"], mlp)


@family("MistralForCausalLM")
def mistral(hf: HF) -> ModelConfig:
    mixer = attention(hf, window=hf.get("sliding_window"))
    return decoder(hf, [mixer] * hf["num_hidden_layers"], MLPConfig(hf["intermediate_size"]))


@family("Qwen2ForCausalLM")
def qwen2(hf: HF) -> ModelConfig:
    mixers = [attention(hf, window=window, qkv_bias=True) for window in windows(hf)]
    return decoder(hf, mixers, MLPConfig(hf["intermediate_size"]))


@family("Qwen3ForCausalLM")
def qwen3(hf: HF) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    mixers = [attention(hf, window=window, qk_norm=True, qkv_bias=bias, out_bias=bias) for window in windows(hf)]
    return decoder(hf, mixers, MLPConfig(hf["intermediate_size"]))

"""One short function a family: a checkpoint's `config.json` -> ModelConfig.

Nothing after this file asks for a family's name. A new family is a function here and a row in
`tests/models/families.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.arch.config import (
    AttentionConfig,
    LongScaling,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Norms,
    PerLayerConfig,
    QueryGrowth,
    RopeConfig,
    RouterConfig,
    ShortConvConfig,
)
from localllm.arch.fields import Fields
from localllm.arch.layout import LLAMA, OTHER_SENSES, Layout, Rules, of_layers
from localllm.arch.parts import (
    activation,
    attention,
    check_kinds,
    decoder,
    delta_net,
    latent,
    layer_count,
    layer_types,
    mlp,
    moe,
    rope,
    sigmoid_router,
    sparse_after_dense,
)
from localllm.errors import DamagedModel, UnsupportedModel

Describe = Callable[[Fields], ModelConfig]


@dataclass(frozen=True)
class Family:
    """`defaults`: what this family's config.json may leave out, as its `transformers` class has it."""

    describe: Describe
    layout: Layout | Callable[[Fields], Layout]
    defaults: Mapping[str, Any]


FAMILIES: dict[str, Family] = {}


def family(
    *architectures: str,
    layout: Layout | Callable[[Fields], Layout] | None = None,
    **defaults: Any,
) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        FAMILIES.update(dict.fromkeys(architectures, Family(describe, layout or Layout(), defaults)))
        return describe

    return register


def describe(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` names; of one that also sees or hears, the part that reads text.

    Raises UnsupportedModel for a family, activation or rope that does not run here, and DamagedModel where a
    field is missing or makes no sense.
    """
    known = family_of(config)
    return known.describe(fields_of(known, config))


def layout(config: Mapping[str, Any]) -> Layout:
    """How checkpoints of this `config.json` spell their tensors. Raises as `describe`."""
    known = family_of(config)
    found = known.layout(fields_of(known, config)) if callable(known.layout) else known.layout
    return replace(found, unused=(*found.unused, OTHER_SENSES)) if Fields(config).has("text_config") else found


def fields_of(known: Family, config: Mapping[str, Any]) -> Fields:
    return Fields({**known.defaults, **text_fields(config)})


def family_of(config: Mapping[str, Any]) -> Family:
    name = next(iter(Fields(config).texts("architectures")), "none")
    if name == "Mistral3ForConditionalGeneration":  # a frame for two families
        kind = Fields(config).part("text_config").text("model_type", "mistral")
        name = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}.get(kind, kind)
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"the family {name!r} is not supported", f"these are: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model the fields of its text part, and those of the whole that it does not have itself."""
    part = Fields(config).part("text_config").values
    return {**part, **config, **{name: value for name, value in part.items() if value is not None}}


# --- pieces that some families share ---


def sparse_steps(hf: Fields, experts: MoEConfig) -> list[MLPConfig | MoEConfig]:
    """Experts in each `decoder_sparse_step`th layer, but for `mlp_only_layers` (transformers' own rule)."""
    dense, every = hf.ids("mlp_only_layers"), hf.size("decoder_sparse_step")
    return [mlp(hf) if i in dense or (i + 1) % every else experts for i in range(layer_count(hf))]


def without_guesses(found: Layout) -> Callable[[Fields], Layout]:
    """Layers behind the model's own that guess further tokens are not read (multi-token prediction)."""

    def layout(hf: Fields) -> Layout:
        layers = layer_count(hf)
        more = min(hf.whole("num_nextn_predict_layers"), layers)
        return replace(found, unused=of_layers(range(layers, layers + more), ".*"))

    return layout


def windows(hf: Fields) -> list[int | None]:
    """Each layer's sliding window: by `layer_types`, else by Qwen's `max_window_layers`."""
    layers = layer_count(hf)
    if not hf.flag("use_sliding_window"):
        return [None] * layers
    kinds = layer_types(hf) or [
        "sliding_attention" if i >= hf.size("max_window_layers") else "full_attention" for i in range(layers)
    ]
    return [hf.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds]


def alternating(hf: Fields, *, every: int, **changes: Any) -> list[AttentionConfig]:
    """One attention a layer: windows, with full attention in each `every`th layer where `layer_types` is missing.

    Old configurations scale the rope of the full layers alone, and may have `rope_local_base_freq` for the others.
    """
    kinds = layer_types(hf) or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layer_count(hf))
    ]
    full = attention(hf, **changes)
    sliding = replace(full, window=hf.size("sliding_window"))
    if hf.part("rope_parameters").has("full_attention"):
        full = replace(full, rope=rope(hf, full.head_dim, kind="full_attention"))
        sliding = replace(sliding, rope=rope(hf, full.head_dim, kind="sliding_attention"))
    elif hf.has("rope_local_base_freq"):
        sliding = replace(sliding, rope=RopeConfig(hf.number("rope_local_base_freq"), full.head_dim))
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


# --- Llama and its kin: one norm before each half of a layer ---


@family("LlamaForCausalLM")
def llama(hf: Fields) -> ModelConfig:
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
def mistral(hf: Fields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf))


@family("MinistralForCausalLM", num_key_value_heads=8)
def ministral(hf: Fields) -> ModelConfig:
    return decoder(hf, alternating(hf, every=layer_count(hf) + 1), mlp(hf))


@family("Ministral3ForCausalLM", num_key_value_heads=8)
def ministral3(hf: Fields) -> ModelConfig:
    ropes = hf.part("rope_parameters" if hf.has("rope_parameters") else "rope_scaling")
    if not ropes.values:
        raise DamagedModel("config.json lacks rope_parameters", "fetch the model again")
    beta = ropes.number("llama_4_scaling_beta", None)
    growth = QueryGrowth(beta, ropes.size("original_max_position_embeddings")) if beta else None
    mixer = attention(hf, window=hf.size("sliding_window", None), query_growth=growth)
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf))


@family("Qwen2ForCausalLM", max_window_layers=28)
def qwen2(hf: Fields) -> ModelConfig:
    return decoder(hf, [attention(hf, window=window, qkv_bias=True) for window in windows(hf)], mlp(hf))


@family("Qwen3ForCausalLM", max_window_layers=28)
def qwen3(hf: Fields) -> ModelConfig:
    return decoder(hf, [replace(qwen3_mixer(hf), window=window) for window in windows(hf)], mlp(hf))


def qwen3_mixer(hf: Fields) -> AttentionConfig:
    bias = hf.flag("attention_bias")
    return attention(hf, qk_norm="per_head", qkv_bias=bias, out_bias=bias)


@family("Phi3ForCausalLM")
def phi3(hf: Fields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    long = mixer.rope.scaling if mixer.rope else None
    usual = long.original_context if isinstance(long, LongScaling) else None
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf), default_context=usual)


@family(
    "SmolLM3ForCausalLM",
    tie_word_embeddings=True,
    no_rope_layer_interval=4,
    num_key_value_heads=4,
    rope_theta=2e6,
)
def smollm3(hf: Fields) -> ModelConfig:
    every = hf.size("no_rope_layer_interval")
    turns = hf.flags("no_rope_layers") or [(i + 1) % every != 0 for i in range(layer_count(hf))]
    check_kinds(hf, "no_rope_layers", turns, (True, False))
    windowed = hf.flag("use_sliding_window") and hf.has("sliding_window")
    kinds = layer_types(hf) or [
        "sliding_attention" if windowed and not turn else "full_attention" for turn in turns
    ]
    bias = hf.flag("attention_bias")
    with_rope = attention(hf, qkv_bias=bias, out_bias=bias)
    mixers = [
        replace(
            with_rope,
            window=hf.size("sliding_window") if kind == "sliding_attention" else None,
            rope=with_rope.rope if turn else None,
        )
        for turn, kind in zip(turns, kinds, strict=True)
    ]
    return decoder(hf, mixers, mlp(hf, bias=hf.flag("mlp_bias")))


@family("GraniteForCausalLM", embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0)
def granite(hf: Fields) -> ModelConfig:
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


# --- norms in other places ---

SANDWICH = Layout(
    names=(
        (r"\.input_layernorm\.", ".before_mixer."),
        (r"\.post_attention_layernorm\.", ".after_mixer."),
        (r"\.pre_feedforward_layernorm\.", ".before_ffn."),
        (r"\.post_feedforward_layernorm\.", ".after_ffn."),
    )
)
GLM4 = Layout(
    names=(
        (r"\.input_layernorm\.", ".before_mixer."),
        (r"\.post_self_attn_layernorm\.", ".after_mixer."),
        (r"\.post_attention_layernorm\.", ".before_ffn."),
        (r"\.post_mlp_layernorm\.", ".after_ffn."),
    )
)


@family("Olmo2ForCausalLM", layout=SANDWICH)
def olmo2(hf: Fields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixers = [attention(hf, qk_norm="whole", qkv_bias=bias, out_bias=bias)] * layer_count(hf)
    return decoder(hf, mixers, mlp(hf), norms=Norms(False, True, False, True))


@family("Olmo3ForCausalLM", layout=SANDWICH, rope_theta=500000.0)
def olmo3(hf: Fields) -> ModelConfig:
    bias = hf.flag("attention_bias")
    mixers = alternating(hf, every=4, qk_norm="whole", qkv_bias=bias, out_bias=bias)
    if hf.has("rope_scaling"):
        plain = RopeConfig(hf.number("rope_theta"), mixers[0].head_dim)
        mixers = [replace(mixer, rope=plain) if mixer.window else mixer for mixer in mixers]
    return decoder(hf, mixers, mlp(hf), norms=Norms(False, True, False, True))


@family("Glm4ForCausalLM", layout=GLM4, partial_rotary_factor=0.5, num_key_value_heads=2, attention_bias=True)
def glm4(hf: Fields) -> ModelConfig:
    mixer = attention(hf, interleaved=True, qkv_bias=hf.flag("attention_bias"))
    return decoder(hf, [mixer] * layer_count(hf), mlp(hf), norms=Norms(True, True, True, True))


@family("Cohere2ForCausalLM", tie_word_embeddings=True, logit_scale=0.0625, layer_norm_eps=1e-5)
def cohere2(hf: Fields) -> ModelConfig:
    every = hf.size("sliding_window_pattern", 4)
    bias = hf.flag("attention_bias")
    mixers = alternating(hf, every=every, interleaved=True, qkv_bias=bias, out_bias=bias)
    return decoder(
        hf,
        [mixer if mixer.window else replace(mixer, rope=None) for mixer in mixers],
        mlp(hf),
        parallel=True,
        norms=Norms(before_ffn=False),
        norm="layer",
        norm_eps=hf.number("layer_norm_eps"),
        logit_scale=hf.number("logit_scale"),
    )


# --- Gemma ---

GEMMA = replace(SANDWICH, norm_offset=1.0)
GEMMA_FIELDS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}


@family(
    "Gemma2ForCausalLM",
    layout=GEMMA,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    num_key_value_heads=4,
    **GEMMA_FIELDS,
)
def gemma2(hf: Fields) -> ModelConfig:
    return gemma(hf, every=2, softcap=hf.number("attn_logit_softcapping", None))


@family(
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    layout=GEMMA,
    rope_theta=1e6,
    rope_local_base_freq=10000.0,
    vocab_size=262208,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    sliding_window_pattern=6,
    **GEMMA_FIELDS,
)
def gemma3(hf: Fields) -> ModelConfig:
    return gemma(hf, every=hf.size("sliding_window_pattern"), qk_norm="per_head")


def gemma(hf: Fields, *, every: int, **changes: Any) -> ModelConfig:
    if hf.flag("use_bidirectional_attention"):
        raise UnsupportedModel("a model that looks ahead is not supported", "use one that generates text")
    bias = hf.flag("attention_bias")
    scale = hf.number("query_pre_attn_scalar") ** -0.5
    return decoder(
        hf,
        alternating(hf, every=every, scale=scale, qkv_bias=bias, out_bias=bias, **changes),
        mlp(hf),
        norms=Norms(True, True, True, True),
        embedding_scale=hf.size("hidden_size") ** 0.5,
        logit_softcap=hf.number("final_logit_softcapping", None),
    )


def gemma4_layout(hf: Fields) -> Layout:
    """Layers that read the keys and values of others may store unused ones. With experts, the norms and the MLP of
    what else is the feed-forward half are those of the shared expert."""
    first = layer_count(hf) - hf.whole("num_kv_shared_layers")
    unused = of_layers(range(max(first, 0), layer_count(hf)), r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*")
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
    return Layout(names=(*(mixture if hf.flag("enable_moe_block") else ()), *SANDWICH.names), unused=unused)


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
def gemma4(hf: Fields) -> ModelConfig:
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
            hf, hf.size("num_experts"), router, size="moe_intermediate_size", chosen="top_k_experts", apart=True
        )
        ffns = [replace(experts, shared=ffn) for ffn in ffns]
    dim = hf.whole("hidden_size_per_layer_input")
    if dim and hf.size("vocab_size_per_layer_input") < hf.size("vocab_size"):
        raise DamagedModel("config.json has tokens without a per-layer embedding", "fetch the model again")
    return decoder(
        hf,
        mixers,
        ffns,
        norms=Norms(True, True, not mixture, True),
        output_scale=True,
        embedding_scale=hf.size("hidden_size") ** 0.5,
        logit_softcap=hf.number("final_logit_softcapping", None),
        per_layer=PerLayerConfig(hf.size("vocab_size_per_layer_input"), dim, activation(hf)) if dim else None,
    )


def gemma4_mixers(hf: Fields) -> list[AttentionConfig]:
    """Sliding and full layers differ in rope, in the size of heads and in how many keys and values have. The last
    layers read the keys and values of the last before them of their kind."""
    count = layer_count(hf)
    kinds = layer_types(hf) or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    kinds = [*kinds[:-1], "full_attention"]  # as transformers has it
    first_shared = count - hf.whole("num_kv_shared_layers")
    last_own = {kind: i for i, kind in enumerate(kinds[: max(first_shared, 0)])}
    if not last_own.keys() >= set(kinds):
        raise DamagedModel("config.json shares keys and values that no layer makes", "fetch the model again")
    mixers = []
    for i, kind in enumerate(kinds):
        own = gemma4_sizes(hf, i, kind)
        turn, bias = rope(own, own.size("head_dim"), kind=kind), hf.flag("attention_bias")
        mixer = attention(own, rope=turn, scale=1.0, qk_norm="per_head", qkv_bias=bias, out_bias=bias)
        mixer = replace(mixer, value_norm=True)
        if kind == "sliding_attention":
            mixer = replace(mixer, window=hf.size("sliding_window"))
        elif hf.flag("attention_k_eq_v"):
            mixer = replace(mixer, keys_as_values=True)
        mixers.append(replace(mixer, kv_source=last_own[kind]) if i >= first_shared else mixer)
    return mixers


def gemma4_sizes(hf: Fields, index: int, kind: str) -> Fields:
    """What a layer has instead of the model's own: by `per_layer_config`, else by the fields for full layers."""
    if hf.has("per_layer_config"):
        sizes = hf.part("per_layer_config").part(str(index)).values
    elif kind == "full_attention":
        heads = hf.values.get("num_global_key_value_heads") if hf.flag("attention_k_eq_v") else None
        sizes = {"head_dim": hf.size("global_head_dim")} | ({"num_key_value_heads": heads} if heads else {})
    else:
        sizes = {}
    if not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
        raise UnsupportedModel(
            f"layer {index} differs in {', '.join(sizes)}", "only the sizes of heads may differ"
        )
    return Fields({**hf.values, **sizes})


# --- mixtures of experts ---


@family(
    "MixtralForCausalLM",
    layout=Layout(
        names=(
            *LLAMA,
            (r"\.block_sparse_moe\.gate\.", ".mlp.router."),
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.mlp\.gate\.", ".mlp.router."),
            (r"\.w1\.", ".gate_proj."),
            (r"\.w2\.", ".down_proj."),
            (r"\.w3\.", ".up_proj."),
        )
    ),
    num_key_value_heads=8,
    rope_theta=1e6,
)
def mixtral(hf: Fields) -> ModelConfig:
    mixer = attention(hf, window=hf.size("sliding_window", None))
    experts = moe(hf, hf.size("num_local_experts"), RouterConfig(), size="intermediate_size")
    return decoder(hf, [mixer] * layer_count(hf), experts)


@family(
    "Qwen3MoeForCausalLM",
    layout=Layout(names=(*LLAMA, (r"\.mlp\.gate\.", ".mlp.router."))),
    decoder_sparse_step=1,
    num_key_value_heads=4,
    sliding_window=4096,
)
def qwen3_moe(hf: Fields) -> ModelConfig:
    count = hf.size("num_experts", None) or hf.size("num_local_experts")
    router = RouterConfig(normalize=hf.flag("norm_topk_prob"))
    experts = moe(hf, count, router, size="moe_intermediate_size")
    window = hf.size("sliding_window") if hf.flag("use_sliding_window") else None
    mixer = replace(qwen3_mixer(hf), window=window)
    return decoder(hf, [mixer] * layer_count(hf), sparse_steps(hf, experts))


SHARED_EXPERTS = Layout(
    names=(
        *LLAMA,
        (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.correction_bias"),
        (r"\.mlp\.gate\.", ".mlp.router."),
        (r"\.mlp\.shared_experts?\.", ".mlp.shared."),
        (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_gate."),
    )
)


@family(
    "Glm4MoeForCausalLM",
    layout=without_guesses(SHARED_EXPERTS),
    partial_rotary_factor=0.5,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
def glm4_moe(hf: Fields) -> ModelConfig:
    experts = beside_shared(hf, sigmoid_router(hf))
    qk_norm = "per_head" if hf.flag("use_qk_norm") else None
    mixer = attention(hf, qk_norm=qk_norm, qkv_bias=hf.flag("attention_bias"))
    return decoder(hf, [mixer] * layer_count(hf), sparse_after_dense(hf, experts))


def beside_shared(hf: Fields, router: RouterConfig) -> MoEConfig:
    """DeepSeek's mixtures: the shared experts are one MLP of their joint size."""
    shared = MLPConfig(hf.size("moe_intermediate_size") * hf.size("n_shared_experts"), activation(hf))
    return moe(hf, hf.size("n_routed_experts"), router, size="moe_intermediate_size", shared=shared)


LATENT = Layout(
    names=(
        *SHARED_EXPERTS.names,
        (r"\.kv_a_proj_with_mqa\.", ".kv_a_proj."),
        (r"\.(q|kv)_a_layernorm\.", r".\1_a_norm."),
    )
)


@family(
    "DeepseekV3ForCausalLM",
    layout=without_guesses(LATENT),
    q_lora_rank=None,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_interleave=True,
    num_nextn_predict_layers=1,
)
@family(
    "Glm4MoeLiteForCausalLM",
    layout=without_guesses(LATENT),
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    first_k_dense_replace=1,
    rope_interleave=True,
    num_nextn_predict_layers=1,
)
def deepseek_v3(hf: Fields) -> ModelConfig:
    experts = beside_shared(hf, sigmoid_router(hf))
    return decoder(hf, [latent(hf)] * layer_count(hf), sparse_after_dense(hf, experts))


@family(
    "DeepseekV2ForCausalLM", layout=LATENT, topk_method="greedy", routed_scaling_factor=1.0, rope_interleave=True
)
def deepseek_v2(hf: Fields) -> ModelConfig:
    router = RouterConfig(normalize=False, scale=hf.number("routed_scaling_factor"))
    if hf.text("topk_method") == "group_limited_greedy":
        router = replace(router, groups=hf.size("n_group"), chosen_groups=hf.size("topk_group"), judged_by=1)
    experts = beside_shared(hf, router)
    return decoder(hf, [latent(hf)] * layer_count(hf), sparse_after_dense(hf, experts))


@family(
    "GptOssForCausalLM",
    layout=Layout(experts_transposed=True, gate_up_interleaved=True),
    sliding_window=128,
    rope_theta=150000.0,
    attention_bias=True,
    head_dim=64,
    num_key_value_heads=8,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)
def gpt_oss(hf: Fields) -> ModelConfig:
    if (hf.number("swiglu_limit", 7.0), hf.number("swiglu_alpha", 1.702)) != (7.0, 1.702):
        raise UnsupportedModel(
            "a swiglu_limit other than 7 or a swiglu_alpha other than 1.702 is not supported",
            "use the published gpt-oss models",
        )
    bias = hf.flag("attention_bias")
    experts = moe(hf, hf.size("num_local_experts"), RouterConfig(bias=True), size="intermediate_size")
    clamped = replace(experts.expert, activation="swiglu_clamped", bias=True)
    mixers = alternating(hf, every=2, sinks=True, qkv_bias=bias, out_bias=bias)
    return decoder(hf, mixers, replace(experts, expert=clamped))


# --- hybrids: most layers are recurrent, with a state whose size does not grow ---

QWEN_HYBRID = replace(SHARED_EXPERTS, norm_offset=1.0, unused=(r"mtp\..*",))  # mtp drafts several tokens ahead
QWEN_HYBRID_FIELDS: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


@family(
    "Qwen3NextForCausalLM",
    layout=QWEN_HYBRID,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    num_key_value_heads=2,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_next(hf: Fields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), sparse_steps(hf, qwen_hybrid_experts(hf)))


@family(
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    layout=QWEN_HYBRID,
    num_key_value_heads=4,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_5(hf: Fields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), mlp(hf))


@family(
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    layout=QWEN_HYBRID,
    num_key_value_heads=2,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    **QWEN_HYBRID_FIELDS,
)
def qwen3_5_moe(hf: Fields) -> ModelConfig:
    return decoder(hf, qwen_hybrid_mixers(hf), qwen_hybrid_experts(hf))


def qwen_hybrid_mixers(hf: Fields) -> list[Mixer]:
    every = hf.size("full_attention_interval")
    kinds = layer_types(hf, ("linear_attention", "full_attention")) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layer_count(hf))
    ]
    bias = hf.flag("attention_bias")
    attends = attention(hf, qk_norm="per_head", output_gate=True, qkv_bias=bias, out_bias=bias)
    recurs = delta_net(hf)
    return [recurs if kind == "linear_attention" else attends for kind in kinds]


def qwen_hybrid_experts(hf: Fields) -> MoEConfig:
    router = RouterConfig(normalize=hf.flag("norm_topk_prob", True))
    shared = MLPConfig(hf.size("shared_expert_intermediate_size"), activation(hf))
    size = "moe_intermediate_size"
    return moe(hf, hf.size("num_experts"), router, size=size, shared=shared, shared_gate=True)


LFM2 = Layout(
    names=(
        (r"\.operator_norm\.", ".before_mixer."),
        (r"\.ffn_norm\.", ".before_ffn."),
        (r"^embedding_norm\.", "norm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
        (r"\.feed_forward\.gate\.", ".mlp.router."),
        (r"\.feed_forward\.expert_bias", ".mlp.correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)
LFM2_FIELDS: dict[str, Any] = {
    "rope_theta": 1e6,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
}


@family("Lfm2ForCausalLM", layout=LFM2, block_multiple_of=256, **LFM2_FIELDS)
def lfm2(hf: Fields) -> ModelConfig:
    width = hf.size("block_ff_dim", None) or hf.size("intermediate_size")
    if hf.flag("block_auto_adjust_ff_dim", True):
        multiple = hf.size("block_multiple_of")
        width = int(hf.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return lfm2_decoder(hf, MLPConfig(width))


@family(
    "Lfm2MoeForCausalLM",
    layout=LFM2,
    num_dense_layers=2,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=1792,
    **LFM2_FIELDS,
)
def lfm2_moe(hf: Fields) -> ModelConfig:
    router = RouterConfig(
        score="sigmoid",
        normalize=hf.flag("norm_topk_prob", True),
        correction=hf.flag("use_expert_bias", True),
        scale=hf.number("routed_scaling_factor", 1.0),
    )
    experts = moe(hf, hf.size("num_experts"), router, size="moe_intermediate_size")
    dense = hf.whole("num_dense_layers")
    return lfm2_decoder(hf, [mlp(hf) if i < dense else experts for i in range(layer_count(hf))])


def lfm2_decoder(hf: Fields, ffn: MLPConfig | list[MLPConfig | MoEConfig]) -> ModelConfig:
    attending = hf.ids("full_attn_idxs") if hf.has("full_attn_idxs") else range(layer_count(hf))
    kinds = layer_types(hf, ("conv", "full_attention")) or [
        "full_attention" if i in attending else "conv" for i in range(layer_count(hf))
    ]
    attends = attention(hf, qk_norm="per_head")
    recurs = ShortConvConfig(hf.size("hidden_size"), hf.size("conv_L_cache"), hf.flag("conv_bias"))
    return decoder(
        hf,
        [recurs if kind == "conv" else attends for kind in kinds],
        ffn,
        norm_eps=hf.number("norm_eps"),
        tie_embeddings=hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
    )

"""Translates the names of tensors in a checkpoint to those of the runtime.

These are Llama's, except for the norms, which are named by their place:

    embed_tokens  norm  lm_head
    layers.N.{before_mixer,after_mixer,before_ffn,after_ffn}
    layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm,sinks}, or qkv_proj for the first three
    layers.N.linear_attn.{in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,conv1d,A_log,dt_bias,norm,out_proj}, or A for
        A_log, in_proj_qkvz and in_proj_ba for the first four, in the order of the key heads
    layers.N.conv.{in_proj,conv,out_proj}
    layers.N.self_attn.{q_a_proj,q_a_norm,q_b_proj,kv_a_proj,kv_a_norm,kv_b_proj,o_proj} of latent attention,
        q_proj for the first three, k_b_proj and v_b_proj for kv_b_proj
    layers.N.mlp.{gate_proj,up_proj,down_proj}, or gate_up_proj for the first two
    layers.N.mlp.{router,correction_bias,expert_scale,shared_gate}
    layers.N.mlp.shared.{gate_proj,up_proj,down_proj}
    layers.N.mlp.{before_router,before_shared,after_shared,before_experts,after_experts}, norms within an MoE layer
    layers.N.mlp.experts.E.{gate_proj,up_proj,down_proj}, or gate_up_proj

    embed_positions, embed_kinds, embed_norm and dense.N of encoders

    embed_tokens_per_layer, per_layer_model_projection, per_layer_projection_norm
    layers.N.{per_layer_input_gate,per_layer_projection,post_per_layer_input_norm}, layers.N.layer_scalar

each followed by `.weight` or `.bias`, or the parts of a quantized format. Experts that a file stacks in one tensor
are split when its header is read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

Rules = tuple[tuple[str, str], ...]

# Prefixes of the text model's names in multimodal checkpoints.
PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")
# Rope frequencies, which old writers stored, and scales of an FP8 cache, whose dtype the file does not determine
# here.
IGNORED_TENSORS = (
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"layers\.\d+\.self_attn\.([qkv]_proj\.)?([qkv]|output)_scale",
)
LM_HEAD = r"lm_head\..*"
MULTIMODAL = r"(visual|vision\w*|audio\w*|multi_modal_projector|embed_vision|embed_audio|patch_merger)\..*"

# Stacked experts are parameters of one module, so their names lack `.weight`.
STACKED_EXPERTS: Rules = (
    (r"(\.experts\.\w+_proj)$", r"\1.weight"),
    (r"(\.experts\.\w+_proj)_(bias|blocks|scales)$", r"\1.\2"),
    (r"(\.experts\.\w+_proj)_scale_inv$", r"\1.weight_scale_inv"),
    (r"(\.experts\.\w+_proj)_activation_scale$", r"\1.activation_scale"),
)
# Looked up by row in the mapped file, in its stored dtype: it may be half of a model.
PER_LAYER_TABLE = "embed_tokens_per_layer"
LLAMA: Rules = ((r"\.input_layernorm\.", ".before_mixer."), (r"\.post_attention_layernorm\.", ".before_ffn."))


def layer_patterns(numbers: Iterable[int], names: str) -> tuple[str, ...]:
    """Return the pattern of these names in the given layers; () for no layers."""
    alternatives = "|".join(map(str, numbers))
    return (rf"layers\.({alternatives})\.{names}",) if alternatives else ()


@dataclass(frozen=True)
class TensorLayout:
    """`names`: regular expressions and their replacements, applied in order after the prefix is removed."""

    names: Rules = LLAMA
    unused: tuple[str, ...] = ()  # patterns of names that the runtime does not use
    norm_offset: float = 0.0  # added to stored norm weights (Gemma stores weight - 1)
    experts_transposed: bool = False  # stacked experts are stored as [experts, in, out]
    gate_up_interleaved: bool = False  # rows of gate and up alternate

    def runtime_name(self, name: str) -> str | None:
        """Return the runtime's name of a stored tensor; None if the tensor is not read."""
        name = PREFIX.sub("", name, count=1) if PREFIX.match(name) else name
        if any(re.fullmatch(pattern, name) for pattern in (*IGNORED_TENSORS, *self.unused)):
            return None
        for pattern, new in (*self.names, *STACKED_EXPERTS):
            name = re.sub(pattern, new, name)
        return name

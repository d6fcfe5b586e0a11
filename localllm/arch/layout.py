"""How a checkpoint spells the tensors of a decoder: its names, in the vocabulary of the runtime.

That vocabulary is Llama's, with the norms named by their place:

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
    layers.N.mlp.{before_router,before_shared,after_shared,before_experts,after_experts}, norms within a mixture
    layers.N.mlp.experts.E.{gate_proj,up_proj,down_proj}, or gate_up_proj

    embed_positions, embed_kinds, embed_norm and dense.N of encoders

    embed_tokens_per_layer, per_layer_model_projection, per_layer_projection_norm
    layers.N.{per_layer_input_gate,per_layer_projection,post_per_layer_input_norm}, layers.N.layer_scalar

each followed by `.weight` or `.bias`, or what a quantized format has in their place. Experts that a file stacks in
one tensor are taken apart when its header is read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

Rules = tuple[tuple[str, str], ...]

# What stands before the text model's names in checkpoints that see or hear, too.
PREFIX = re.compile(r"(model\.language_model|language_model\.model|language_model|model)\.")
# Old writers stored the rope frequencies. Scales of a cache in FP8: what the cache is kept in here, is not the
# file's to say.
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
# Looked up by row where it lies in the file, in the dtype it is stored in: it may be half of a model.
PER_LAYER_TABLE = "embed_tokens_per_layer"
LLAMA: Rules = ((r"\.input_layernorm\.", ".before_mixer."), (r"\.post_attention_layernorm\.", ".before_ffn."))


def layer_patterns(numbers: Iterable[int], names: str) -> tuple[str, ...]:
    """The pattern of these names in the layers of these numbers; none for no layers."""
    found = "|".join(map(str, numbers))
    return (rf"layers\.({found})\.{names}",) if found else ()


@dataclass(frozen=True)
class TensorLayout:
    """`names`: regular expressions and what they are replaced by, in this order, after the prefix is gone."""

    names: Rules = LLAMA
    unused: tuple[str, ...] = ()  # patterns of whole names that this program has no use for
    norm_offset: float = 0.0  # what is stored is the norm's weight less this (Gemma)
    experts_transposed: bool = False  # stacked experts are stored [experts, in, out]
    gate_up_interleaved: bool = False  # rows of gate and up take turns

    def runtime_name(self, name: str) -> str | None:
        """The runtime's name of a stored tensor; None if it is not read at all."""
        name = PREFIX.sub("", name, count=1) if PREFIX.match(name) else name
        if any(re.fullmatch(pattern, name) for pattern in (*IGNORED_TENSORS, *self.unused)):
            return None
        for pattern, new in (*self.names, *STACKED_EXPERTS):
            name = re.sub(pattern, new, name)
        return name

"""Scale folds: where columns of a layer's matrices can be multiplied by s by dividing what produces their inputs.

    norm -> the matrices that read it      the norm's weight is divided, considering its stored offset
    v -> o                                 rows of v; query heads that share a head of v share its s
    up -> down                             rows of up, unless it is clamped and incremented (gpt-oss)
    gate -> out of a short convolution     the rows of its input's second third

No fold exists for matrices that read the residual itself (no norm before them: OLMo 2; per-layer gates), o of a
normalized v and of latent attention, out of a delta net, and experts behind a norm of their own. They are rounded
unscaled. If a router, or another matrix that stays unquantized, reads the same norm, s are powers of two, which
leave all its bits unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.arch.config import AttentionConfig, LatentConfig, LayerConfig, MLPConfig, ShortConvConfig
from localllm.plan.weights import UNQUANTIZED_MATRIX

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj")
DELTA_NET_INPUTS = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a")
MLP_INPUTS = ("gate_up_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class ScaleFold:
    """Matrices, by name without `.weight`, that read the same inputs, and what produces these.

    The first reader sees all inputs.
    """

    readers: tuple[str, ...]
    norm: str | None = None  # the producer of the inputs: a norm, or
    producer: str = ""  # rows of a matrix from `first_row` on
    first_row: int = 0
    head_dim: int = 1
    heads_per_producer: int = 1  # heads of the input per head of the producer
    powers_of_two: bool = False  # restrict s to powers of two

    def nearest_foldable(self, s: Tensor) -> Tensor:
        """Return the nearest s [in] that can be folded."""
        log = s.log2()
        if self.heads_per_producer > 1:
            heads = log.view(-1, self.heads_per_producer, self.head_dim)
            log = heads.mean(1, keepdim=True).expand_as(heads).flatten()
        return torch.exp2(log.round() if self.powers_of_two else log)

    def producer_scale(self, s: Tensor) -> Tensor:
        """Return the divisors of the producer's rows for s [in]."""
        return s.view(-1, self.heads_per_producer, self.head_dim)[:, 0].flatten()


class LayerFolds:
    """The folds of one layer, by runtime names."""

    def __init__(self, config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor]):
        """prefix: `layers.N.`"""
        self.config = config
        self.prefix = prefix
        self.tensors = tensors

    def existing(self, scope: str, *names: str) -> list[str]:
        candidates = (f"{self.prefix}{scope}{name}" for name in names)
        return [name for name in candidates if f"{name}.weight" in self.tensors]

    def norm_folds(self, norm: str, readers: list[str]) -> list[ScaleFold]:
        """Return the fold of matrices that read a norm, if it exists."""
        if not readers or not (norms := self.existing("", norm)):
            return []
        must_be_exact = any(UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight") for name in readers)
        return [ScaleFold(tuple(readers), norm=norms[0], powers_of_two=must_be_exact)]

    def down_proj_folds(self, scope: str, config: MLPConfig) -> list[ScaleFold]:
        if config.activation == "swiglu_clamped":
            return []
        [down] = self.existing(scope, "down_proj")
        separate = self.existing(scope, "up_proj")
        if separate:
            return [ScaleFold((down,), producer=separate[0])]
        [fused] = self.existing(scope, "gate_up_proj")
        return [ScaleFold((down,), producer=fused, first_row=config.intermediate_size)]

    def ffn_folds(self) -> list[ScaleFold]:
        ffn = self.config.ffn
        if isinstance(ffn, MLPConfig):
            return self.down_proj_folds("mlp.", ffn)
        folds = [
            fold for e in range(ffn.experts) for fold in self.down_proj_folds(f"mlp.experts.{e}.", ffn.expert)
        ]
        if ffn.shared:
            folds += self.down_proj_folds("mlp.shared.", ffn.shared)
        return folds + (
            self.norm_folds("mlp.before_shared", self.existing("mlp.shared.", *MLP_INPUTS)) if ffn.apart else []
        )

    def ffn_readers(self) -> list[str]:
        """Return the readers of the feed-forward norm, beginning with a router, which sees every token."""
        ffn = self.config.ffn
        if isinstance(ffn, MLPConfig):
            return self.existing("mlp.", *MLP_INPUTS)
        if ffn.apart:
            return []
        experts = [name for e in range(ffn.experts) for name in self.existing(f"mlp.experts.{e}.", *MLP_INPUTS)]
        return [
            *self.existing("mlp.", "router", "shared_gate"),
            *self.existing("mlp.shared.", *MLP_INPUTS),
            *experts,
        ]

    def mixer_folds(self) -> list[ScaleFold]:
        """Return the folds within the mixer."""
        mixer = self.config.mixer
        if isinstance(mixer, ShortConvConfig):
            in_proj, out = self.existing("conv.", "in_proj", "out_proj")
            return [ScaleFold((out,), producer=in_proj, first_row=mixer.channels)]
        if isinstance(mixer, LatentConfig):
            return self.norm_folds("self_attn.q_a_norm", self.existing("self_attn.", "q_b_proj"))
        if not isinstance(mixer, AttentionConfig) or mixer.kv_source is not None:
            return []
        if mixer.keys_as_values or mixer.value_norm:
            return []
        group = mixer.heads // mixer.kv_heads
        [out] = self.existing("self_attn.", "o_proj")
        separate = self.existing("self_attn.", "v_proj")
        if separate:
            return [ScaleFold((out,), producer=separate[0], head_dim=mixer.head_dim, heads_per_producer=group)]
        [fused] = self.existing("self_attn.", "qkv_proj")
        first_row = (mixer.heads * (2 if mixer.output_gate else 1) + mixer.kv_heads) * mixer.head_dim
        return [
            ScaleFold(
                (out,), producer=fused, first_row=first_row, head_dim=mixer.head_dim, heads_per_producer=group
            )
        ]


def find_folds(
    config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor], kv_shared: bool
) -> list[ScaleFold]:
    """Return a layer's folds, beginning with those within its halves.

    kv_shared: other layers read its keys and values.
    """
    layer = LayerFolds(config, prefix, tensors)
    folds = [*(() if kv_shared else layer.mixer_folds()), *layer.ffn_folds()]
    mixer = [
        *layer.existing("self_attn.", *ATTENTION_INPUTS),
        *layer.existing("linear_attn.", *DELTA_NET_INPUTS),
        *layer.existing("conv.", "in_proj"),
    ]
    ffn = layer.ffn_readers()
    if config.parallel and not config.norms.before_ffn:
        return [*folds, *layer.norm_folds("before_mixer", [*mixer, *ffn])]
    if not config.parallel:
        folds += layer.norm_folds("before_mixer", mixer)
    return [*folds, *layer.norm_folds("before_ffn", ffn)]


def apply_fold(fold: ScaleFold, s: Tensor, tensors: dict[str, Tensor], norm_offset: float) -> None:
    """Multiply the readers' columns by s [in] and divide the producer. tensors: updated in place"""
    for name in fold.readers:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * s
    if fold.norm:
        name = f"{fold.norm}.weight"
        tensors[name] = (tensors[name].float() + norm_offset) / s - norm_offset
        return
    divisor = fold.producer_scale(s)
    rows = slice(fold.first_row, fold.first_row + len(divisor))
    for name, quotient in ((f"{fold.producer}.weight", divisor[:, None]), (f"{fold.producer}.bias", divisor)):
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][rows] /= quotient

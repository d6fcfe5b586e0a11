"""Where columns of a layer's matrices can be multiplied by s, as what makes their inputs can be divided by it.

    norm -> the matrices that read it      its weight is divided, whatever it is stored less
    v -> o                                 rows of v; query heads that share a head of v share its s
    up -> down                             rows of up, but where it is clamped and a one added (gpt-oss)
    gate -> out of a short convolution     the rows of its input's second third

Without a fold: matrices that read the residual itself (no norm before them: OLMo 2; per-layer gates), o of a
normed v and of latent attention, out of a delta net, experts behind a norm of their own. They are rounded as they
are. Where a router, or another matrix that stays as it is, reads the same norm, s are powers of two: multiplied by
those a number keeps all its bits.
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
    """Matrices by their names without `.weight`. The first of the readers sees all inputs."""

    readers: tuple[str, ...]
    norm: str | None = None  # what makes the inputs: a norm, or
    producer: str = ""  # rows of a matrix, from `first` on
    first_row: int = 0
    head_dim: int = 1
    heads_per_producer: int = 1  # heads of the input that come from one of the maker's
    powers_of_two: bool = False  # powers of two only

    def nearest_foldable(self, s: Tensor) -> Tensor:
        """The nearest s [in] that can be folded."""
        log = s.log2()
        if self.heads_per_producer > 1:
            heads = log.view(-1, self.heads_per_producer, self.head_dim)
            log = heads.mean(1, keepdim=True).expand_as(heads).flatten()
        return torch.exp2(log.round() if self.powers_of_two else log)

    def producer_scale(self, s: Tensor) -> Tensor:
        """s [in] -> what each of the maker's rows is divided by."""
        return s.view(-1, self.heads_per_producer, self.head_dim)[:, 0].flatten()


class LayerFolds:
    """What one layer has, by runtime name."""

    def __init__(self, config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor]):
        """prefix: `layers.N.`"""
        self.config = config
        self.prefix = prefix
        self.tensors = tensors

    def existing(self, place: str, *names: str) -> list[str]:
        found = (f"{self.prefix}{place}{name}" for name in names)
        return [name for name in found if f"{name}.weight" in self.tensors]

    def norm_folds(self, norm: str, readers: list[str]) -> list[ScaleFold]:
        """Of matrices that read a norm, if it is there."""
        if not readers or not (place := self.existing("", norm)):
            return []
        exact = any(UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight") for name in readers)
        return [ScaleFold(tuple(readers), norm=place[0], powers_of_two=exact)]

    def down_proj_folds(self, place: str, config: MLPConfig) -> list[ScaleFold]:
        if config.activation == "swiglu_clamped":
            return []
        [down] = self.existing(place, "down_proj")
        apart = self.existing(place, "up_proj")
        if apart:
            return [ScaleFold((down,), producer=apart[0])]
        [fused] = self.existing(place, "gate_up_proj")
        return [ScaleFold((down,), producer=fused, first_row=config.intermediate_size)]

    def ffn_folds(self) -> list[ScaleFold]:
        ffn = self.config.ffn
        if isinstance(ffn, MLPConfig):
            return self.down_proj_folds("mlp.", ffn)
        found = [
            fold for e in range(ffn.experts) for fold in self.down_proj_folds(f"mlp.experts.{e}.", ffn.expert)
        ]
        if ffn.shared:
            found += self.down_proj_folds("mlp.shared.", ffn.shared)
        return found + (
            self.norm_folds("mlp.before_shared", self.existing("mlp.shared.", *MLP_INPUTS)) if ffn.apart else []
        )

    def ffn_readers(self) -> list[str]:
        """Of the norm before the feed-forward half; a router first, which sees every token."""
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
        """What mixes positions, up to its output."""
        mixer = self.config.mixer
        if isinstance(mixer, ShortConvConfig):
            into, out = self.existing("conv.", "in_proj", "out_proj")
            return [ScaleFold((out,), producer=into, first_row=mixer.channels)]
        if isinstance(mixer, LatentConfig):
            return self.norm_folds("self_attn.q_a_norm", self.existing("self_attn.", "q_b_proj"))
        if not isinstance(mixer, AttentionConfig) or mixer.kv_source is not None:
            return []
        if mixer.keys_as_values or mixer.value_norm:
            return []
        share = mixer.heads // mixer.kv_heads
        [out] = self.existing("self_attn.", "o_proj")
        apart = self.existing("self_attn.", "v_proj")
        if apart:
            return [ScaleFold((out,), producer=apart[0], head_dim=mixer.head_dim, heads_per_producer=share)]
        [fused] = self.existing("self_attn.", "qkv_proj")
        before = (mixer.heads * (2 if mixer.output_gate else 1) + mixer.kv_heads) * mixer.head_dim
        return [
            ScaleFold((out,), producer=fused, first_row=before, head_dim=mixer.head_dim, heads_per_producer=share)
        ]


def find_folds(
    config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor], kv_shared: bool
) -> list[ScaleFold]:
    """Of one layer, those within its halves first. kv_shared: do other layers read its keys and values?"""
    places = LayerFolds(config, prefix, tensors)
    found = [*(() if kv_shared else places.mixer_folds()), *places.ffn_folds()]
    mixer = [
        *places.existing("self_attn.", *ATTENTION_INPUTS),
        *places.existing("linear_attn.", *DELTA_NET_INPUTS),
        *places.existing("conv.", "in_proj"),
    ]
    ffn = places.ffn_readers()
    if config.parallel and not config.norms.before_ffn:
        return [*found, *places.norm_folds("before_mixer", [*mixer, *ffn])]
    if not config.parallel:
        found += places.norm_folds("before_mixer", mixer)
    return [*found, *places.norm_folds("before_ffn", ffn)]


def apply_fold(fold: ScaleFold, s: Tensor, tensors: dict[str, Tensor], norm_offset: float) -> None:
    """Multiplies the columns and divides what makes them. s: [in]; tensors: new ones replace the old."""
    for name in fold.readers:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * s
    if fold.norm:
        name = f"{fold.norm}.weight"
        tensors[name] = (tensors[name].float() + norm_offset) / s - norm_offset
        return
    divisor = fold.producer_scale(s)
    rows = slice(fold.first_row, fold.first_row + len(divisor))
    for name, by in ((f"{fold.producer}.weight", divisor[:, None]), (f"{fold.producer}.bias", divisor)):
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][rows] /= by

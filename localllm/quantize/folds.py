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
from localllm.plan.weights import KEPT

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj")
DELTA_NET = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a")
GATE_UP = ("gate_up_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class Fold:
    """Matrices by their names without `.weight`. The first of the readers sees all inputs."""

    readers: tuple[str, ...]
    norm: str | None = None  # what makes the inputs: a norm, or
    maker: str = ""  # rows of a matrix, from `first` on
    first: int = 0
    head_dim: int = 1
    share: int = 1  # heads of the input that come from one of the maker's
    exact: bool = False  # powers of two only

    def allowed(self, s: Tensor) -> Tensor:
        """The nearest s [in] that can be folded."""
        log = s.log2()
        if self.share > 1:
            heads = log.view(-1, self.share, self.head_dim)
            log = heads.mean(1, keepdim=True).expand_as(heads).flatten()
        return torch.exp2(log.round() if self.exact else log)

    def of_maker(self, s: Tensor) -> Tensor:
        """s [in] -> what each of the maker's rows is divided by."""
        return s.view(-1, self.share, self.head_dim)[:, 0].flatten()


class Places:
    """What one layer has, by runtime name."""

    def __init__(self, config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor]):
        """prefix: `layers.N.`"""
        self.config = config
        self.prefix = prefix
        self.tensors = tensors

    def there(self, place: str, *names: str) -> list[str]:
        found = (f"{self.prefix}{place}{name}" for name in names)
        return [name for name in found if f"{name}.weight" in self.tensors]

    def behind(self, norm: str, readers: list[str]) -> list[Fold]:
        """Of matrices that read a norm, if it is there."""
        if not readers or not (place := self.there("", norm)):
            return []
        exact = any(KEPT.fullmatch(f"{name}.weight") for name in readers)
        return [Fold(tuple(readers), norm=place[0], exact=exact)]

    def up_down(self, place: str, config: MLPConfig) -> list[Fold]:
        if config.activation == "swiglu_clamped":
            return []
        [down] = self.there(place, "down_proj")
        apart = self.there(place, "up_proj")
        if apart:
            return [Fold((down,), maker=apart[0])]
        [fused] = self.there(place, "gate_up_proj")
        return [Fold((down,), maker=fused, first=config.intermediate_size)]

    def feed_forward(self) -> list[Fold]:
        ffn = self.config.ffn
        if isinstance(ffn, MLPConfig):
            return self.up_down("mlp.", ffn)
        found = [fold for e in range(ffn.experts) for fold in self.up_down(f"mlp.experts.{e}.", ffn.expert)]
        if ffn.shared:
            found += self.up_down("mlp.shared.", ffn.shared)
        return found + (self.behind("mlp.before_shared", self.there("mlp.shared.", *GATE_UP)) if ffn.apart else [])

    def ffn_readers(self) -> list[str]:
        """Of the norm before the feed-forward half; a router first, which sees every token."""
        ffn = self.config.ffn
        if isinstance(ffn, MLPConfig):
            return self.there("mlp.", *GATE_UP)
        if ffn.apart:
            return []
        experts = [name for e in range(ffn.experts) for name in self.there(f"mlp.experts.{e}.", *GATE_UP)]
        return [*self.there("mlp.", "router", "shared_gate"), *self.there("mlp.shared.", *GATE_UP), *experts]

    def values(self) -> list[Fold]:
        """What mixes positions, up to its output."""
        mixer = self.config.mixer
        if isinstance(mixer, ShortConvConfig):
            into, out = self.there("conv.", "in_proj", "out_proj")
            return [Fold((out,), maker=into, first=mixer.channels)]
        if isinstance(mixer, LatentConfig):
            return self.behind("self_attn.q_a_norm", self.there("self_attn.", "q_b_proj"))
        if not isinstance(mixer, AttentionConfig) or mixer.kv_source is not None:
            return []
        if mixer.keys_as_values or mixer.value_norm:
            return []
        share = mixer.heads // mixer.kv_heads
        [out] = self.there("self_attn.", "o_proj")
        apart = self.there("self_attn.", "v_proj")
        if apart:
            return [Fold((out,), maker=apart[0], head_dim=mixer.head_dim, share=share)]
        [fused] = self.there("self_attn.", "qkv_proj")
        before = (mixer.heads * (2 if mixer.output_gate else 1) + mixer.kv_heads) * mixer.head_dim
        return [Fold((out,), maker=fused, first=before, head_dim=mixer.head_dim, share=share)]


def folds(config: LayerConfig, prefix: str, tensors: Mapping[str, Tensor], others_read: bool) -> list[Fold]:
    """Of one layer, those within its halves first. others_read: do other layers read its keys and values?"""
    places = Places(config, prefix, tensors)
    found = [*(() if others_read else places.values()), *places.feed_forward()]
    mixer = [
        *places.there("self_attn.", *ATTENTION),
        *places.there("linear_attn.", *DELTA_NET),
        *places.there("conv.", "in_proj"),
    ]
    ffn = places.ffn_readers()
    if config.parallel and not config.norms.before_ffn:
        return [*found, *places.behind("before_mixer", [*mixer, *ffn])]
    if not config.parallel:
        found += places.behind("before_mixer", mixer)
    return [*found, *places.behind("before_ffn", ffn)]


def apply(fold: Fold, s: Tensor, tensors: dict[str, Tensor], norm_offset: float) -> None:
    """Multiplies the columns and divides what makes them. s: [in]; tensors: new ones replace the old."""
    for name in fold.readers:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * s
    if fold.norm:
        name = f"{fold.norm}.weight"
        tensors[name] = (tensors[name].float() + norm_offset) / s - norm_offset
        return
    divisor = fold.of_maker(s)
    rows = slice(fold.first, fold.first + len(divisor))
    for name, by in ((f"{fold.maker}.weight", divisor[:, None]), (f"{fold.maker}.bias", divisor)):
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][rows] /= by

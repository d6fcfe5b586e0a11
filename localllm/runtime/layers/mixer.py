"""The half of a layer that mixes positions: which kind it is, its config says."""

from collections.abc import Callable

from torch import Tensor

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    Mixer,
    ModelConfig,
    ShortConvConfig,
)
from localllm.runtime.layers.attention import Attention
from localllm.runtime.layers.delta_net import DeltaNet
from localllm.runtime.layers.latent import LatentAttention
from localllm.runtime.layers.short_conv import ShortConv
from localllm.runtime.layers.within import EncoderAttention
from localllm.runtime.weight_source import WeightSource


def load_mixer(config: Mixer, model: ModelConfig, source: WeightSource) -> Callable[..., Tensor]:
    """From the place that its kind has in a checkpoint; called with x [T, hidden], the batch, its cache, and maybe
    the norm before it and the residual that it is added to."""
    match config:
        case AttentionConfig():
            kind = EncoderAttention if model.encoder else Attention
            return kind(config, model, source.under("self_attn"))
        case LatentConfig():
            return LatentAttention(config, model, source.under("self_attn"))
        case DeltaNetConfig():
            return DeltaNet(config, model, source.under("linear_attn"))
        case ShortConvConfig():
            return ShortConv(config, model, source.under("conv"))

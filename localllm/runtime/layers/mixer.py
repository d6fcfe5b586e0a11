"""The half of a layer that mixes positions: attention, or a recurrent kind."""

from collections.abc import Callable

from torch import Tensor

from localllm.arch.config import AttentionConfig, DeltaNetConfig, Mixer, ModelConfig, ShortConvConfig
from localllm.runtime.layers.attention import Attention
from localllm.runtime.layers.delta_net import DeltaNet
from localllm.runtime.layers.short_conv import ShortConv
from localllm.runtime.load import Source


def load_mixer(config: Mixer, model: ModelConfig, source: Source) -> Callable[..., Tensor]:
    """From where its kind stands in a checkpoint. It is called with x [T, hidden], the batch and its cache."""
    match config:
        case AttentionConfig():
            return Attention(config, model, source.under("self_attn"))
        case DeltaNetConfig():
            return DeltaNet(config, model, source.under("linear_attn"))
        case ShortConvConfig():
            return ShortConv(config, model, source.under("conv"))

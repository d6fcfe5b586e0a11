"""The half of a layer that mixes positions: which kind it is, its config says."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from localllm.arch.config import AttentionConfig, LatentConfig, ModelConfig
from localllm.runtime.batch import Batch
from localllm.runtime.layers.attention import Attention
from localllm.runtime.layers.latent import LatentAttention
from localllm.runtime.load import Source

# x [T, hidden], the step, the layer's cache, which is of the mixer's own kind -> [T, hidden]
Mixer = Callable[[Tensor, Batch, Any], Tensor]


def load_mixer(config: AttentionConfig | LatentConfig, model: ModelConfig, source: Source) -> Mixer:
    if isinstance(config, LatentConfig):
        return LatentAttention(config, model, source)
    return Attention(config, model, source)

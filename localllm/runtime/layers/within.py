"""Attention within whole texts: no cache, and each token sees what is around it, or before it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.layers.attention import Attention
from localllm.runtime.texts import EncoderBatch
from localllm.runtime.weight_source import WeightSource


class EncoderAttention(Attention):
    """With the weights of the attention that has a cache."""

    def __init__(self, config: AttentionConfig, model: ModelConfig, source: WeightSource):
        super().__init__(config, model, source)
        self.causal = model.encoder is not None and model.encoder.causal

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - the texts take the batch's place
        self, x: Tensor, batch: EncoderBatch, _: None, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden] -> [T, hidden], of norm(x) and added to the residual"""
        c = self.config
        q, k, v = (
            self.qkv(x, norm=norm).unflatten(-1, (-1, c.head_dim)).split((c.heads, c.kv_heads, c.kv_heads), 1)
        )
        if self.q_norm and self.k_norm:
            whole = c.qk_norm == "whole"
            q, k = (n(each.flatten(1) if whole else each) for n, each in ((self.q_norm, q), (self.k_norm, k)))
            q, k = (each.unflatten(-1, (-1, c.head_dim)) if whole else each for each in (q, k))
        if c.rope:
            q, k = (kernels.rotate(each, *batch.rope_angles[c.rope], c.rope.interleaved) for each in (q, k))
        parted = zip(batch.split_by_length(q), batch.split_by_length(k), batch.split_by_length(v), strict=True)
        mixed = torch.cat([self.attend(*each) for each in parted])
        return self.out(mixed, residual=residual)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: [texts, length, their heads, head_dim] -> [texts * length, heads * head_dim]"""
        c, length = self.config, q.shape[1]
        windowed = c.window is not None and c.window < length
        found = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            attn_mask=window_mask(length, c.window, q.device, causal=self.causal)
            if windowed and c.window
            else None,
            is_causal=self.causal and not windowed,
            scale=c.scale,
            enable_gqa=c.heads != c.kv_heads,
        )
        return found.transpose(1, 2).flatten(0, 1).flatten(1)


def window_mask(length: int, window: int, device: torch.device, *, causal: bool) -> Tensor:
    """[length, length], true where a query sees a key: less than `window` before it, or around it."""
    place = torch.arange(length, device=device)
    before = place[:, None] - place
    return (before < window) & ((before >= 0) if causal else (before > -window))

"""Multi-head latent attention over a cache of latents."""

import torch
from torch import Tensor

from localllm.arch.config import LatentConfig, ModelConfig
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.kv_cache.tensors import LatentCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.weight_source import WeightSource


class LatentAttention:
    def __init__(self, config: LatentConfig, model: ModelConfig, source: WeightSource):
        self.config = c = config
        hidden, queries = model.hidden_size, {"q_proj": c.heads * (c.nope_dim + c.rope_dim)}
        if c.q_lora_rank is None:
            self.q_a = None
            self.q = Linear.load(source, queries, hidden, bias=False)
        else:
            self.q_a = Linear.load(source, {"q_a_proj": c.q_lora_rank}, hidden, c.bias)
            self.q_norm = load_norm(source, "q_a_norm", c.q_lora_rank, model, c.norm_eps)
            self.q = Linear.load(source, {"q_b_proj": queries["q_proj"]}, c.q_lora_rank, bias=False)
        self.kv_a = Linear.load(source, {"kv_a_proj": c.kv_lora_rank + c.rope_dim}, hidden, c.bias)
        self.kv_norm = load_norm(source, "kv_a_norm", c.kv_lora_rank, model, c.norm_eps)
        self.k_b, self.v_b = load_kv_b(c, source)
        self.out = Linear.load(source, {"o_proj": hidden}, c.heads * c.value_dim, c.bias)

    def __call__(
        self, x: Tensor, batch: Batch, cache: LatentCache, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x: [T, hidden] -> [T, hidden], of norm(x) and added to the residual"""
        c = self.config
        x = norm(x) if norm else x  # for two products
        q = (self.q(self.q_a(x), norm=self.q_norm) if self.q_a else self.q(x)).unflatten(-1, (c.heads, -1))
        nope, turning = q.split((c.nope_dim, c.rope_dim), -1)
        latent, key = self.kv_a(x).split((c.kv_lora_rank, c.rope_dim), -1)
        turned = kernels.rotate(
            torch.cat((turning, key[:, None]), 1), *batch.rope_angles[c.rope], c.rope.interleaved
        )
        turned, key = turned.split((c.heads, 1), 1)
        cache.append(torch.cat((self.kv_norm(latent), key[:, 0]), -1), batch.slot_mapping)
        q = torch.cat((nope, turned), -1)
        return self.out(
            kernels.latent_attention(q, cache, batch, c, self.k_b, self.v_b).flatten(1), residual=residual
        )


def load_kv_b(c: LatentConfig, source: WeightSource) -> tuple[Tensor, Tensor]:
    """What makes each head's keys and values from the latent: [heads, nope_dim, rank], [heads, value_dim, rank].

    Stored as one matrix `kv_b_proj` with a head's rows after another's, or apart and the keys' transposed (GGUF):
    `k_b_proj` [heads * rank, nope_dim], `v_b_proj` [heads * value_dim, rank]. Held apart in the model's dtype,
    because batched products of slices are up to nine times slower (bfloat16, 20 heads on a CPU).
    """
    heads, rank = c.heads, c.kv_lora_rank
    if source.has_matrix("k_b_proj"):
        k_b = (
            source.dequantized_matrix("k_b_proj", heads * rank, c.nope_dim)
            .view(heads, rank, c.nope_dim)
            .transpose(1, 2)
        )
        v_b = source.dequantized_matrix("v_b_proj", heads * c.value_dim, rank).view(heads, c.value_dim, rank)
    else:
        whole = source.dequantized_matrix("kv_b_proj", heads * (c.nope_dim + c.value_dim), rank).view(
            heads, -1, rank
        )
        k_b, v_b = whole.split((c.nope_dim, c.value_dim), 1)
    return k_b.contiguous(), v_b.contiguous()

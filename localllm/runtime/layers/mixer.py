"""The half of a layer that mixes positions; the LayerConfig selects its type."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    Mixer,
    ModelConfig,
    ShortConvConfig,
)
from localllm.runtime import kernels
from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache, RecurrentCache
from localllm.runtime.layers.linear import Linear
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.ranks import Ranks
from localllm.runtime.weight_source import WeightSource


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: AttentionConfig, model: ModelConfig, source: WeightSource):
        self.config = c = config
        self.eps = model.norm_eps
        own_kv_heads = c.kv_heads if c.kv_source is None else 0  # heads whose keys this layer computes
        hidden, queries, keys = model.hidden_size, c.heads * c.head_dim, own_kv_heads * c.head_dim
        separate = {
            "q_proj": queries * (2 if c.output_gate else 1),
            "k_proj": keys,
            "v_proj": 0 if c.keys_as_values else keys,
        }
        separate = {name: rows for name, rows in separate.items() if rows}
        names = {"qkv_proj": sum(separate.values())} if source.has_matrix("qkv_proj") else separate
        self.qkv = Linear.load(source, names, hidden, c.qkv_bias)
        self.out = Linear.load(source, {"o_proj": hidden}, queries, c.out_bias, by_columns=True)
        self.q_norm = self.k_norm = None
        if c.qk_norm:
            norms_all_heads = c.qk_norm == "whole"
            self.q_norm = load_norm(source, "q_norm", queries if norms_all_heads else c.head_dim, model)
            self.k_norm = (
                load_norm(source, "k_norm", keys if norms_all_heads else c.head_dim, model)
                if own_kv_heads
                else None
            )
        self.sinks = source.tensor("sinks", c.heads) if c.sinks else None
        # A norm across the heads of all ranks needs a sum over them, before the kernels.
        self.norm_ranks = source.tensor_ranks if c.qk_norm == "whole" else None

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: KVCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + attention(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        angles = batch.rope_angles[c.rope] if c.rope else None
        qkv, q_norm, k_norm = self.qkv(x, norm=norm), self.q_norm, self.k_norm
        if self.norm_ranks:
            qkv = self.norm_all_heads(qkv, self.norm_ranks)
            c, q_norm, k_norm = replace(c, qk_norm=None), None, None
        mixed = kernels.append_and_attend(qkv, cache, batch, c, angles, q_norm, k_norm, self.eps, self.sinks)
        return self.out(mixed.flatten(1), residual=residual, following=following)

    def norm_all_heads(self, qkv: Tensor, ranks: Ranks) -> Tensor:
        """Normalize q and k of this rank by the mean squares of those of all ranks.

        Heads that several ranks have count several times, all of them as often. qkv: [T, columns] -> the same
        """
        c = self.config
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = qkv.split([*widths, qkv.shape[1] - sum(widths)], 1)
        parts = [part.float() for part in (q, k)]
        means = ranks.all_reduce(torch.stack([part.square().mean(1) for part in parts], 1)) / ranks.shard.size
        normed = [
            part * torch.rsqrt(mean[:, None] + norm.eps) * norm.weight
            for part, mean, norm in zip(parts, means.unbind(1), (self.q_norm, self.k_norm), strict=True)
            if norm and norm.weight is not None
        ]
        return torch.cat((*(part.to(qkv.dtype) for part in normed), v), 1)


class LatentAttention:
    """Multi-head latent attention over a cache of latents."""

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
        self.out = Linear.load(source, {"o_proj": hidden}, c.heads * c.value_dim, c.bias, by_columns=True)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: LatentCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + attention(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        x = norm(x) if norm else x  # once for both products
        q = (self.q(self.q_a(x), norm=self.q_norm) if self.q_a else self.q(x)).unflatten(-1, (c.heads, -1))
        nope, unrotated = q.split((c.nope_dim, c.rope_dim), -1)
        latent, key = self.kv_a(x).split((c.kv_lora_rank, c.rope_dim), -1)
        rotated = kernels.rotate(
            torch.cat((unrotated, key[:, None]), 1), *batch.rope_angles[c.rope], c.rope.interleaved
        )
        rotated, key = rotated.split((c.heads, 1), 1)
        cache.append(torch.cat((self.kv_norm(latent), key[:, 0]), -1), batch.slot_mapping)
        q = torch.cat((nope, rotated), -1)
        mixed = kernels.latent_attention(q, cache, batch, c, self.k_b, self.v_b)
        return self.out(mixed.flatten(1), residual=residual, following=following)


def load_kv_b(c: LatentConfig, source: WeightSource) -> tuple[Tensor, Tensor]:
    """Return the up-projections of the latent: keys [heads, nope_dim, rank] and values [heads, value_dim, rank].

    They are stored as one matrix `kv_b_proj` with the rows of each head in sequence, or separately with the keys'
    transposed (GGUF): `k_b_proj` [heads * rank, nope_dim], `v_b_proj` [heads * value_dim, rank]. They are kept
    separately in the model's dtype, because batched products of slices are up to nine times slower (bfloat16, 20
    heads on a CPU).
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
        kv_b = source.dequantized_matrix("kv_b_proj", heads * (c.nope_dim + c.value_dim), rank).view(
            heads, -1, rank
        )
        k_b, v_b = kv_b.split((c.nope_dim, c.value_dim), 1)
    return k_b.contiguous(), v_b.contiguous()


class EncoderAttention(Attention):
    """Attention of an encoder: within whole texts, without a cache.

    Each token attends to all tokens of its text, or to those before it. The weights are those of attention with a
    cache.
    """

    def __init__(self, config: AttentionConfig, model: ModelConfig, source: WeightSource):
        super().__init__(config, model, source)
        self.causal = model.encoder is not None and model.encoder.causal

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - takes an EncoderBatch
        self,
        x: Tensor,
        batch: EncoderBatch,
        _: None,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + attention(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        q, k, v = (
            self.qkv(x, norm=norm).unflatten(-1, (-1, c.head_dim)).split((c.heads, c.kv_heads, c.kv_heads), 1)
        )
        if self.q_norm and self.k_norm:
            norms_all_heads = c.qk_norm == "whole"
            q, k = (
                n(tensor.flatten(1) if norms_all_heads else tensor)
                for n, tensor in ((self.q_norm, q), (self.k_norm, k))
            )
            q, k = (tensor.unflatten(-1, (-1, c.head_dim)) if norms_all_heads else tensor for tensor in (q, k))
        if c.rope:
            q, k = (kernels.rotate(tensor, *batch.rope_angles[c.rope], c.rope.interleaved) for tensor in (q, k))
        groups = zip(batch.split_by_length(q), batch.split_by_length(k), batch.split_by_length(v), strict=True)
        mixed = torch.cat([self.attend(*tensor) for tensor in groups])
        return self.out(mixed, residual=residual, following=following)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within texts of one length. q, k, v: [texts, length, heads or kv_heads, head_dim]

        Returns [texts * length, heads * head_dim].
        """
        c, length = self.config, q.shape[1]
        windowed = c.window is not None and c.window < length
        output = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)),
            attn_mask=window_mask(length, c.window, q.device, causal=self.causal)
            if windowed and c.window
            else None,
            is_causal=self.causal and not windowed,
            scale=c.scale,
            enable_gqa=c.heads != c.kv_heads,
        )
        return output.transpose(1, 2).flatten(0, 1).flatten(1)


def window_mask(length: int, window: int, device: torch.device, *, causal: bool) -> Tensor:
    """Return [length, length] bool, true where a key is less than `window` before the query, or on either side."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance < window) & ((distance >= 0) if causal else (distance > -window))


class DeltaNet:
    """A gated delta net (Qwen3-Next, Qwen3.5): recurrent, with a state of constant size."""

    def __init__(self, config: DeltaNetConfig, model: ModelConfig, source: WeightSource):
        self.config = c = config
        self.eps = model.norm_eps
        hidden, values = model.hidden_size, c.value_heads * c.value_dim
        shares = c.value_heads // c.key_heads
        if source.has_matrix("in_proj_qkvz"):
            order = partial(
                rows_by_part, c.key_heads, [c.key_dim, c.key_dim, shares * c.value_dim, shares * c.value_dim]
            )
            self.qkvz = Linear.load(source, {"in_proj_qkvz": c.channels + values}, hidden, False, order)
        else:
            self.qkvz = Linear.load(source, {"in_proj_qkv": c.channels, "in_proj_z": values}, hidden, False)
        if source.has_matrix("in_proj_ba"):
            order = partial(rows_by_part, c.key_heads, [shares, shares])
            self.ba = Linear.load(source, {"in_proj_ba": 2 * c.value_heads}, hidden, False, order)
        else:
            self.ba = Linear.load(source, {"in_proj_b": c.value_heads, "in_proj_a": c.value_heads}, hidden, False)
        self.conv_weight = source.float32_tensor("conv1d.weight", c.channels, 1, c.kernel_size)[
            :, 0
        ].T.contiguous()
        stores_rate = source.weights.has("A")  # GGUF
        self.decay_rate = (
            source.float32_tensor("A", c.value_heads)
            if stores_rate
            else -source.float32_tensor("A_log", c.value_heads).exp()
        )
        self.dt_bias = source.float32_tensor("dt_bias", c.value_heads)
        self.norm = source.float32_tensor("norm.weight", c.value_dim)
        self.out = Linear.load(source, {"out_proj": hidden}, values, bias=False, by_columns=True)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: RecurrentCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + delta_net(norm(x)). x: [T, hidden] -> [T, hidden]"""
        c = self.config
        x = norm(x) if norm else x  # once for both products
        qkv, z = self.qkvz(x).split((c.channels, c.value_heads * c.value_dim), -1)
        b, a = self.ba(x).float().chunk(2, -1)  # [T, value_heads]
        qkv = kernels.causal_conv(qkv, self.conv_weight, cache, batch, silu=True)
        qk, v = qkv.split((2 * c.key_heads * c.key_dim, c.value_heads * c.value_dim), -1)
        q, k = kernels.l2_normalize(qk.unflatten(-1, (-1, c.key_dim))).chunk(2, 1)
        v, z = (tensor.unflatten(-1, (-1, c.value_dim)) for tensor in (v, z))
        decay, beta = self.decay_rate * kernels.softplus(a + self.dt_bias), kernels.sigmoid(b)
        if c.tiled:
            v, decay, beta = (regroup_heads(tensor, c.key_heads) for tensor in (v, decay, beta))
        mixed = kernels.delta_net(q, k, v, decay, beta, cache, batch)
        if c.tiled:
            mixed = regroup_heads(mixed, c.value_heads // c.key_heads)
        mixed = kernels.gated_rms_norm(mixed, z, self.norm, self.eps)
        return self.out(mixed.flatten(1), residual=residual, following=following)


def regroup_heads(x: Tensor, heads: int) -> Tensor:
    """Reorder [T, n * heads, ...], heads varying fastest, so that n varies fastest."""
    return x.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2)


def rows_by_part(heads: int, sizes: list[int]) -> Tensor:
    """Return the row order that groups parts (q, k, v, z) of a stack in which each head has all parts in
    sequence.
    """
    parts = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, 1)
    return torch.cat([rows.flatten() for rows in parts])


class ShortConv:
    """A gated short convolution layer (LFM2): recurrent, with only its last inputs as state."""

    def __init__(self, config: ShortConvConfig, model: ModelConfig, source: WeightSource):
        hidden, channels, bias = model.hidden_size, config.channels, config.bias
        self.in_proj = Linear.load(source, {"in_proj": 3 * channels}, hidden, bias)
        taps = source.float32_tensor("conv.weight", channels, 1, config.kernel_size)
        self.conv_weight = taps[:, 0].T.contiguous()
        self.bias = source.tensor("conv.bias", channels) if bias else None
        self.out = Linear.load(source, {"out_proj": hidden}, channels, bias, by_columns=True)

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: RecurrentCache,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + conv(norm(x)). x: [T, hidden] -> [T, hidden]"""
        before, after, x = self.in_proj(x, norm=norm).chunk(3, -1)
        mixed = kernels.causal_conv(before * x, self.conv_weight, cache, batch)
        mixed = after * (mixed if self.bias is None else mixed + self.bias)
        return self.out(mixed, residual=residual, following=following)


def load_mixer(config: Mixer, model: ModelConfig, source: WeightSource) -> Callable[..., Tensor]:
    """Load a mixer from its prefix in the checkpoint.

    It is called with x [T, hidden], the batch, its cache, and optionally the norm before it, the residual, and the
    norm that follows.
    """
    match config:
        case AttentionConfig():
            attention_class = EncoderAttention if model.encoder else Attention
            return attention_class(config, model, source.under("self_attn"))
        case LatentConfig():
            return LatentAttention(config, model, source.under("self_attn"))
        case DeltaNetConfig():
            return DeltaNet(config, model, source.under("linear_attn"))
        case ShortConvConfig():
            return ShortConv(config, model, source.under("conv"))

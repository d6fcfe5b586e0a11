"""From the vectors of a text's tokens to the text's own: pooled, through the dense layers, of length one."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.pooling import DenseConfig, Kind, Pooling
from localllm.runtime.layers.linear import Linear
from localllm.runtime.load import Source
from localllm.runtime.texts import Texts


class Pool:
    def __init__(self, how: Pooling, source: Source | None = None):
        """source: of the dense layers."""
        self.kind: Kind = how.kind
        self.dense = [load_dense(dense, source, i) for i, dense in enumerate(how.dense) if source]

    def of_texts(self, x: Tensor, texts: Texts) -> Tensor:
        """x: [T, hidden] -> [texts, dimension] float32, in the order of the texts"""
        return self.finished(torch.cat([self.pooled(each.float()) for each in texts.parted(x)]))

    def pooled(self, x: Tensor) -> Tensor:
        """x: [texts, length, hidden] -> [texts, hidden]"""
        match self.kind:
            case "mean":
                return x.mean(1)
            case "cls":
                return x[:, 0]
            case "last":
                return x[:, -1]

    def gathered(self, before: Tensor | None, x: Tensor) -> Tensor:
        """What is kept of a text that comes in pieces. before: of the pieces until now; x: [T, hidden] float32 of
        the next -> [hidden]"""
        match self.kind:
            case "mean":
                return x.sum(0) if before is None else before + x.sum(0)
            case "cls":
                return x[0] if before is None else before
            case "last":
                return x[-1]

    def shared(self, gathered: Tensor, tokens: int) -> Tensor:
        """gathered: [hidden] of so many tokens -> [hidden]"""
        return gathered / tokens if self.kind == "mean" else gathered

    def finished(self, pooled: Tensor) -> Tensor:
        """pooled: [texts, hidden] float32 -> [texts, dimension] float32 of length one"""
        for layer in self.dense:
            pooled = layer(pooled)
        return F.normalize(pooled.float(), dim=-1)


def load_dense(config: DenseConfig, source: Source, place: int) -> Callable[[Tensor], Tensor]:
    linear = Linear.load(source, {f"dense.{place}": config.rows}, config.columns, config.bias)
    dtype, squash = source.dtype, torch.tanh if config.activation == "tanh" else torch.nn.Identity()
    return lambda x: squash(linear(x.to(dtype)))

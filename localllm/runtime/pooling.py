"""Turns the vectors of a text's tokens into one: pooling, dense layers, normalization to length one."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.arch.pooling import DenseConfig, Pooling, PoolingType
from localllm.runtime.batch import EncoderBatch
from localllm.runtime.layers.linear import Linear
from localllm.runtime.weight_source import WeightSource


class Pooler:
    def __init__(self, config: Pooling, source: WeightSource | None = None):
        """source: weights of the dense layers"""
        self.pooling_type: PoolingType = config.pooling_type
        self.dense = [load_dense(dense, source, i) for i, dense in enumerate(config.dense) if source]

    def pool_batch(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """Pool and project a batch. x: [T, hidden] -> [texts, dimension] float32, in the order of the texts"""
        return self.project_and_normalize(
            torch.cat([self.pool(each.float()) for each in batch.split_by_length(x)])
        )

    def pool(self, x: Tensor) -> Tensor:
        """Pool texts of one length. x: [texts, length, hidden] -> [texts, hidden]"""
        match self.pooling_type:
            case "mean":
                return x.mean(1)
            case "cls":
                return x[:, 0]
            case "last":
                return x[:, -1]

    def accumulate(self, accumulated: Tensor | None, x: Tensor) -> Tensor:
        """Return the accumulated state of a text that is computed in pieces.

        accumulated: state [hidden] after the pieces so far, None at first; x: [T, hidden] float32 of the next
        piece.
        """
        match self.pooling_type:
            case "mean":
                return x.sum(0) if accumulated is None else accumulated + x.sum(0)
            case "cls":
                return x[0] if accumulated is None else accumulated
            case "last":
                return x[-1]

    def average(self, accumulated: Tensor, tokens: int) -> Tensor:
        """Finish pooling of accumulated [hidden] over this many tokens -> [hidden]"""
        return accumulated / tokens if self.pooling_type == "mean" else accumulated

    def project_and_normalize(self, pooled: Tensor) -> Tensor:
        """Apply the dense layers and normalize.

        pooled: [texts, hidden] float32 -> [texts, dimension] float32 of length 1
        """
        for layer in self.dense:
            pooled = layer(pooled)
        return F.normalize(pooled.float(), dim=-1)


def load_dense(config: DenseConfig, source: WeightSource, index: int) -> Callable[[Tensor], Tensor]:
    """Return a dense layer with its activation, [texts, columns] -> [texts, rows]."""
    linear = Linear.load(source, {f"dense.{index}": config.rows}, config.columns, config.bias)
    dtype, squash = source.dtype, torch.tanh if config.activation == "tanh" else torch.nn.Identity()
    return lambda x: squash(linear(x.to(dtype)))

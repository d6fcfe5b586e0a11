"""A matrix with an optional bias."""

from collections.abc import Callable

import torch
from torch import Tensor

from localllm.arch.config import Activation
from localllm.quant.dequantize import dequantize_rows
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime import kernels
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.ranks import Ranks
from localllm.runtime.weight_source import WeightSource


class Linear:
    """A product with weights [out, in] and an optional bias.

    Several weights are stacked by rows; usually it is one.
    """

    def __init__(
        self,
        *weights: Tensor | QuantizedTensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        on_read: Callable[[], None] = lambda: None,
        activation_bits: int | None = None,
        ranks: Ranks | None = None,
        by_rows: bool = False,
    ):
        """dtype: of x; on_read: called whenever some of the weights have been read; activation_bits: see
        `QuantizedTensor`; ranks: that have the other columns, with which the product is summed up; by_rows:
        they have the other rows, and x is divided among all."""
        self.weights = kernels.prepare_weights(
            *weights, dtype=dtype, on_read=on_read, activation_bits=activation_bits
        )
        self.bias = bias  # [out]
        self.ranks = ranks
        self.by_rows = by_rows

    @classmethod
    def load(
        cls,
        source: WeightSource,
        names: dict[str, int],
        columns: int,
        bias: bool,
        order: Callable[[], Tensor] | None = None,
        *,
        by_columns: bool = False,
        summed: bool = True,
    ) -> "Linear":
        """Load the matrices (name -> rows) stacked by rows. order: see `WeightSource.matrices`.

        by_columns: ranks divide the matrix by columns, so that each computes a summand of the product, and the
        first one adds bias and residual; summed: sum them up here, and not where several products are added. In a
        model that is divided by rows alone, this matrix is, too, and is given by the same sizes.
        """
        ranks = source.tensor_ranks if by_columns else None
        by_rows = ranks is not None and source.weights.header.by_rows
        if ranks and by_rows:
            size = ranks.shard.size
            names, columns = {name: rows // size for name, rows in names.items()}, columns * size
        kept = source.kept_matrices(names, columns)
        on_cpu = source.device.type == "cpu"
        weights = kept or source.matrices(names, columns, order, checked=not on_cpu)
        vector = source.concatenated_vectors(names, "bias") if bias else None
        if ranks and ranks.shard.rank and not by_rows:
            vector = None
        with source.phases("repack"):
            linear = cls(
                *weights,
                bias=vector,
                dtype=source.dtype,
                on_read=source.weights.release,
                activation_bits=source.activation_bits,
                ranks=ranks if summed else None,
                by_rows=by_rows,
            )
            if on_cpu and not kept:
                source.check_laid_out(names, weights, linear.weights)
            source.keep_matrices(names, linear.weights)
        return linear

    def __call__(
        self,
        x: Tensor,
        norm: Norm | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        """Return residual + gated(W norm(x) + bias), leaving out what is None. x: [T, in]. See kernels/fused.py

        following: the norm of the result, for a product without norm and activation
        """
        if self.ranks and self.by_rows:
            if residual is not None:
                residual = residual.tensor_split(self.ranks.shard.size, -1)[self.ranks.shard.rank]
            own = kernels.fused_linear(
                self.ranks.all_gather(x), self.weights, self.bias, norm, activation, residual
            )
            return self.ranks.all_gather(own)
        if self.ranks:
            own_residual = residual if self.ranks.shard.rank == 0 else None
            return self.ranks.all_reduce(
                kernels.fused_linear(x, self.weights, self.bias, norm, activation, own_residual)
            )
        if following is not None:
            assert norm is None and activation is None
            return kernels.residual_linear(x, self.weights, self.bias, residual, following)
        return kernels.fused_linear(x, self.weights, self.bias, norm, activation, residual)


class Embedding:
    """An embedding table: token ids to vectors. Only the packed rows of the given tokens are dequantized.

    rows: of the whole table, of which each of several ranks has some; as_stored: convert rows when they are looked
    up, instead of all of them when loading; checked: see `WeightSource.matrix`.
    """

    def __init__(
        self,
        source: WeightSource,
        name: str,
        rows: int,
        columns: int,
        as_stored: bool = False,
        checked: bool = True,
    ):
        self.ranks, self.first_row = source.tensor_ranks, 0
        if self.ranks:
            self.first_row, end_row = self.ranks.shard.vocab_range(rows)
            rows = end_row - self.first_row
        kept = source.kept_matrices({name: rows}, columns)  # of a model whose head is the same matrix
        if kept:
            [self.weight] = kept
        elif as_stored:
            self.weight = source.lookup_table(name, rows, columns)
        else:
            self.weight = source.matrix(name, rows, columns, checked=checked)
        self.dtype = source.dtype
        self.rows = rows

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up rows. ids: [T] int64 -> [T, columns] in the model's dtype"""
        if self.ranks:
            own = ids - self.first_row
            absent = (own < 0) | (own >= self.rows)
            return self.ranks.all_reduce(self.look_up(own.masked_fill(absent, 0)).masked_fill(absent[:, None], 0))
        return self.look_up(ids)

    def look_up(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return self.weight[ids].to(self.dtype)
        return dequantize_rows(self.weight, ids, self.dtype)

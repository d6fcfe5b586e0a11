"""GPTQ: quantizes column by column, compensating each rounding error in the remaining columns.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", section
3.3: with H = X^T X + damping * mean(diag(X^T X)) * I and U the upper Cholesky factor of H^-1, for each column j

    error = (w_j - Q(w_j)) / U_jj,    w_k -= error * U_jk for all k > j.

Columns are processed in descending order of diag(H) ("act-order"): the most important are rounded first. The grids
are fitted beforehand to the original groups ("static groups"), so that the columns of a group stay adjacent and no
order is stored. A column without any input has no effect on the others and is rounded to nearest.
"""

import torch
from torch import Tensor

from localllm.quant.grid import FittedGrid, Grid, fit, split_groups
from localllm.quant.tensor import QuantizedTensor

DAMPING = 0.01  # of the diagonal's mean, as in the paper
MAX_DAMPING = 1.0
BLOCK_COLUMNS = 128  # number of columns after which the rest is updated in one product


class SingularHessian(ArithmeticError):
    """X^T X has no inverse, however much it is damped: it is not finite."""


def quantize(weight: Tensor, hessian: Tensor, grid: Grid) -> QuantizedTensor:
    """Quantize. weight: [out, in]; hessian: [in, in] float32, X^T X of the inputs. Raises SingularHessian."""
    fitted = fit(weight, grid, split_groups(hessian.diagonal()[None], grid.group or weight.shape[1])[0])
    order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = inverse_cholesky(hessian[order][:, order])
    codes = torch.empty(weight.shape)
    codes[:, order] = quantize_columns(weight.float()[:, order], upper, fitted, order.tolist())
    return fitted.pack(codes)


def quantize_columns(weight: Tensor, upper: Tensor, fitted: FittedGrid, order: list[int]) -> Tensor:
    """Return the codes [out, in] of the columns in processing order.

    weight: [out, in] float32, modified; upper: [in, in]; order: index of each column in the matrix
    """
    columns = len(order)
    codes = torch.empty_like(weight)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        errors = torch.empty_like(weight[:, begin:end])
        for j in range(begin, end):
            scale, zero = fitted.column_grid(order[j], columns)
            codes[:, j] = fitted.codes(weight[:, j] / scale, zero)
            errors[:, j - begin] = (weight[:, j] - (codes[:, j] - zero) * scale) / upper[j, j]
            weight[:, j + 1 : end].addr_(errors[:, j - begin], upper[j, j + 1 : end], alpha=-1)
        weight[:, end:].addmm_(errors, upper[begin:end, end:], alpha=-1)
    return codes


def inverse_cholesky(hessian: Tensor) -> Tensor:
    """Return the upper U with U^T U = H^-1, damping H ten times more each time that it is not positive definite.

    hessian: [in, in], modified, to avoid a copy. Raises SingularHessian.
    """
    diagonal = hessian.diagonal().clone()
    dead = diagonal == 0
    mean = diagonal[~dead].mean() if (~dead).any() else torch.ones(())
    damping = DAMPING
    while damping <= MAX_DAMPING:
        hessian.diagonal().copy_(torch.where(dead, mean, diagonal + damping * mean))
        factor, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            factor = torch.cholesky_inverse(factor)
            factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not failed and torch.isfinite(factor).all():
                return factor
        damping *= 10
    raise SingularHessian

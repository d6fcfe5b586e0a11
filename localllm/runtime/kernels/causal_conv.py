"""A short convolution along the tokens of each sequence, channel by channel; its last inputs are kept in a row.

y_t = sum_j taps[j] * x_{t - kernel + 1 + j}, where x before the first token is zero.
"""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.elementwise import silu as activated
from localllm.runtime.kernels.registry import dispatch, kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache


def causal_conv(x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool = False) -> Tensor:
    """x: [T, channels]; taps: [kernel, channels] float32 -> y or silu(y), the shape of x, summed in float32"""
    return dispatch("causal_conv", x, taps, cache, batch, silu)


@kernel("causal_conv", "reference")
def causal_conv_reference(x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool) -> Tensor:
    """Single tokens of all sequences together, longer spans one after another."""
    out, kept = torch.empty_like(x), len(taps) - 1
    if singles := batch.single_token_spans:
        before = singles.gather(cache.conv)  # [S, kernel - 1, channels]
        window = torch.cat((before, x[singles.token_index, None]), 1)
        total = window[:, 0] * taps[0]
        for j in range(1, kept + 1):
            total += window[:, j] * taps[j]
        out[singles.token_index] = total.to(x.dtype)
        before.copy_(window[:, 1:])
        singles.scatter(cache.conv, before)
    for span in batch.spans:
        if span.count == 1:
            continue
        mine = slice(span.start, span.start + span.count)
        inputs = torch.cat((cache.conv[span.state_slot], x[mine]))  # [kernel - 1 + count, channels]
        total = inputs[: span.count] * taps[0]
        for j in range(1, kept + 1):
            total += inputs[j : j + span.count] * taps[j]  # as of single tokens, rounded twice
        out[mine] = total
        for piece, row in span.split_at_saves():
            end = piece.stop - span.start
            cache.conv[row] = inputs[end : end + kept]
    return activated(out) if silu else out

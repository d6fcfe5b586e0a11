"""A short causal convolution along the tokens of each sequence, per channel, with its last inputs as state.

y_t = sum_j taps[j] * x_{t - kernel + 1 + j}, where x before the first token is zero.
"""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.elementwise import silu as activated
from localllm.runtime.kernels.registry import dispatch, kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache


def causal_conv(x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool = False) -> Tensor:
    """Convolve, with an optional SiLU. x: [T, channels]; taps: [kernel, channels] float32 -> the shape of x

    Sums are in float32.
    """
    return dispatch("causal_conv", x, taps, cache, batch, silu)


@kernel("causal_conv", "reference")
def causal_conv_reference(x: Tensor, taps: Tensor, cache: RecurrentCache, batch: Batch, silu: bool) -> Tensor:
    """Process single tokens of all sequences together, and longer spans one after another."""
    out, state_len = torch.empty_like(x), len(taps) - 1
    if single_tokens := batch.single_token_spans:
        before = single_tokens.gather(cache.conv)  # [S, kernel - 1, channels]
        window = torch.cat((before, x[single_tokens.token_index, None]), 1)
        total = window[:, 0] * taps[0]
        for j in range(1, state_len + 1):
            total += window[:, j] * taps[j]
        out[single_tokens.token_index] = total.to(x.dtype)
        before.copy_(window[:, 1:])
        single_tokens.scatter(cache.conv, before)
    for span in batch.spans:
        if span.count == 1:
            continue
        token_slice = slice(span.start, span.start + span.count)
        inputs = torch.cat((cache.conv[span.state_slot], x[token_slice]))  # [kernel - 1 + count, channels]
        total = inputs[: span.count] * taps[0]
        for j in range(1, state_len + 1):
            total += inputs[j : j + span.count] * taps[j]  # rounded twice, as for single tokens
        out[token_slice] = total
        for tokens, state_slot in span.split_at_saves():
            end = tokens.stop - span.start
            cache.conv[state_slot] = inputs[end : end + state_len]
    return activated(out) if silu else out

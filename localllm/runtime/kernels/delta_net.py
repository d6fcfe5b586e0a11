"""The gated delta rule (Yang et al. 2025): each value head keeps a matrix S that maps keys to values. A token lets
it fade, looks up what its own key gives, and corrects that towards its value:

S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q / sqrt(key_dim)

q, k: [T, key_heads, key_dim], v: [T, value_heads, value_dim], decay <= 0 and beta in (0, 1): [T, value_heads]
float32. value_heads / key_heads neighbours share a head of q and k. S is a row of `cache.matrix`, float32.

Bytes moved by a decode step: 5 * value_heads * key_dim * value_dim * 4 a sequence, however long it is.
"""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu import recurrence
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache

# 512 tokens, 32 heads of 128 x 128, one thread, best of 9: 351 ms in 16, 330 in 32, 277 in 64, 344 in 128.
CHUNK_TOKENS = 64


def delta_net(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    """-> the shape of v"""
    arguments = (q, k, v, decay, beta, cache, batch)
    return choose("delta_net", *arguments).run(*arguments)


def cpu_tokens_unsupported(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> str | None:
    return recurrence.unsupported(q, k, v, decay, beta, cache.matrix)


@kernel("delta_net", "cpu-tokens", cpu_tokens_unsupported)
def delta_net_tokens(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    return recurrence.gated_delta_rule(q, k, v, decay, beta, cache.matrix, batch)


@kernel("delta_net", "torch-chunks")
def delta_net_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    """Single tokens of all sequences in one step, longer spans in chunks of matrix products."""
    out = torch.empty_like(v)
    shares = v.shape[1] // k.shape[1]
    q, k = q[:, :, None], k[:, :, None]  # [T, key_heads, 1 or shares, ...], like all that follow
    v, decay, beta = (x.unflatten(1, (-1, shares)) for x in (v, decay, beta))
    q, k, v, decay, beta = (x.to(cache.matrix.dtype) for x in (q, k, v, decay, beta))
    if singles := batch.single_token_spans:
        state, at = singles.gather(cache.matrix), singles.token_index
        got = step_tokens(q[at], k[at], v[at], decay[at], beta[at], state.unflatten(1, (-1, shares)))
        out[at] = got.flatten(1, 2).to(out.dtype)
        singles.scatter(cache.matrix, state)
    for span in batch.spans:
        if span.count == 1:
            continue
        state = cache.matrix[span.state_slot].unflatten(0, (-1, shares))
        for piece, row in span.split_at_saves():
            whole = piece.stop - (piece.stop - piece.start) % CHUNK_TOKENS
            for begin, end, size in ((piece.start, whole, CHUNK_TOKENS), (whole, piece.stop, piece.stop - whole)):
                if begin < end:
                    at = slice(begin, end)
                    got, state = step_chunks(q[at], k[at], v[at], decay[at], beta[at], state, size)
                    out[at] = got.flatten(1, 2).to(out.dtype)
            cache.matrix[row] = state.flatten(0, 1)
    return out


def step_tokens(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each of S sequences; changes `state`, [S, key_heads, shares, key_dim, value_dim], in place.

    The matrix is read once for q and k together: out = exp(decay) S^T q + (q k) delta.
    """
    fade = decay.exp()[..., None]
    query = q * q.shape[-1] ** -0.5
    from_query, from_key = (torch.stack((query, k), -2) @ state).unbind(-2)  # [S, key_heads, shares, value_dim]
    delta = (v - fade * from_key) * beta[..., None]
    state.mul_(fade[..., None]).addcmul_(k[..., None], delta[..., None, :])
    return fade * from_query + (query * k).sum(-1, keepdim=True) * delta


def step_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """One sequence's tokens, a multiple of `size`, from `state` [key_heads, shares, key_dim, value_dim].

    The chunkwise form of Yang et al. 2024, section 3.2, with decay: within a chunk each token's correction depends
    on those before it, a triangular system that is solved for all chunks at once; between chunks only S passes on.
    Returns [n, key_heads, shares, value_dim] and the state after them, which is a new tensor.
    """

    def split(x: Tensor) -> Tensor:
        """[n, heads, shares, ...] -> [heads, shares, chunks, size, ...]"""
        return x.unflatten(0, (-1, size)).movedim((2, 3), (0, 1)).contiguous()

    q, k, v, decay, beta = (split(x) for x in (q * q.shape[-1] ** -0.5, k, v, decay, beta))
    since_begin = decay.cumsum(-1).exp()[..., None]
    # From token j to token i, [..., i, j]: summed up one by one, as differences of sums from the beginning would
    # lose the digits that matter where tokens that fade little follow tokens that fade much.
    between = decay[..., None].expand(*decay.shape, size).tril(-1).cumsum(-2).exp().tril()
    until_end = between[..., -1, :, None]
    system = (k @ k.mT) * between * beta[..., None]  # its diagonal counts as one
    targets = torch.cat((v, k.expand(*v.shape[:-1], -1) * since_begin), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    delta, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.mT) * between
    q, k = q * since_begin, k * until_end
    fade = since_begin[..., -1:, :]
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        each = delta[:, :, i] - from_state[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + within[:, :, i] @ each
        state = state * fade[:, :, i] + k[:, :, i].mT @ each
    return out.movedim((0, 1), (2, 3)).flatten(0, 1), state


@kernel("delta_net", "reference")
def delta_net_reference(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    """The formula, token by token."""
    out = torch.empty_like(v)
    shares = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shares, 1) for x in (q, k))
    q, k, v, decay, beta = (x.to(cache.matrix.dtype) for x in (q, k, v, decay, beta))
    for span in batch.spans:
        state = cache.matrix[span.state_slot].clone()  # [value_heads, key_dim, value_dim]
        for piece, row in span.split_at_saves():
            for t in range(piece.start, piece.stop):
                state = state * decay[t].exp()[:, None, None]
                delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t][:, :, None] * delta[:, None]
                out[t] = torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
            cache.matrix[row] = state
    return out

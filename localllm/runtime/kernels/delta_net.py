"""The gated delta rule (Yang et al. 2025): each value head has a matrix S that maps keys to values.

Each token decays S, looks up the value of its key, and corrects it towards its own value:

S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q / sqrt(key_dim)

q, k: [T, key_heads, key_dim], v: [T, value_heads, value_dim], decay <= 0 and beta in (0, 1): [T, value_heads]
float32. Groups of value_heads / key_heads adjacent value heads share a head of q and k. S is a state slot of
`cache.matrix`, float32.

Bytes moved by a decode step: 5 * value_heads * key_dim * value_dim * 4 per sequence, regardless of its length.
"""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.kernels.cpu import recurrence
from localllm.runtime.kernels.registry import choose, kernel
from localllm.runtime.kv_cache.tensors import RecurrentCache

# 512 tokens, 32 heads of 128 x 128, one thread, best of 9, by chunk: 16: 351 ms, 32: 330, 64: 277, 128: 344.
CHUNK_TOKENS = 64


def delta_net(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    """Apply the rule to the tokens of a batch, and update the states. Returns the shape of v."""
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
    """Process single tokens of all sequences in one step, and longer spans in chunks of matrix products."""
    out = torch.empty_like(v)
    shares = v.shape[1] // k.shape[1]
    q, k = q[:, :, None], k[:, :, None]  # [T, key_heads, 1 or shares, ...], as the following
    v, decay, beta = (x.unflatten(1, (-1, shares)) for x in (v, decay, beta))
    q, k, v, decay, beta = (x.to(cache.matrix.dtype) for x in (q, k, v, decay, beta))
    if single_tokens := batch.single_token_spans:
        state, index = single_tokens.gather(cache.matrix), single_tokens.token_index
        result = step_tokens(
            q[index], k[index], v[index], decay[index], beta[index], state.unflatten(1, (-1, shares))
        )
        out[index] = result.flatten(1, 2).to(out.dtype)
        single_tokens.scatter(cache.matrix, state)
    for span in batch.spans:
        if span.count == 1:
            continue
        state = cache.matrix[span.state_slot].unflatten(0, (-1, shares))
        for tokens, state_slot in span.split_at_saves():
            chunked_end = tokens.stop - (tokens.stop - tokens.start) % CHUNK_TOKENS
            for begin, end, size in (
                (tokens.start, chunked_end, CHUNK_TOKENS),
                (chunked_end, tokens.stop, tokens.stop - chunked_end),
            ):
                if begin < end:
                    index = slice(begin, end)
                    result, state = step_chunks(
                        q[index], k[index], v[index], decay[index], beta[index], state, size
                    )
                    out[index] = result.flatten(1, 2).to(out.dtype)
            cache.matrix[state_slot] = state.flatten(0, 1)
    return out


def step_tokens(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Process one token of each of S sequences; modifies `state` [S, key_heads, shares, key_dim, value_dim] in
    place.

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
    """Process one sequence's tokens, a multiple of `size`, from `state` [key_heads, shares, key_dim, value_dim].

    This is the chunkwise form of Yang et al. 2024, section 3.2, with decay: within a chunk, each token's
    correction depends on those before it, a triangular system that is solved for all chunks at once; only S is
    passed between chunks. Returns [n, key_heads, shares, value_dim] and the new state, as a new tensor.
    """

    def split(x: Tensor) -> Tensor:
        """Reshape [n, heads, shares, ...] to [heads, shares, chunks, size, ...]."""
        return x.unflatten(0, (-1, size)).movedim((2, 3), (0, 1)).contiguous()

    q, k, v, decay, beta = (split(x) for x in (q * q.shape[-1] ** -0.5, k, v, decay, beta))
    since_begin = decay.cumsum(-1).exp()[..., None]
    # Decay from token j to token i, [..., i, j]. The sums are computed separately, because differences of prefix
    # sums lose the relevant digits where tokens with little decay follow tokens with much.
    between = decay[..., None].expand(*decay.shape, size).tril(-1).cumsum(-2).exp().tril()
    until_end = between[..., -1, :, None]
    system = (k @ k.mT) * between * beta[..., None]  # unit diagonal is implied
    targets = torch.cat((v, k.expand(*v.shape[:-1], -1) * since_begin), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    delta, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.mT) * between
    q, k = q * since_begin, k * until_end
    decay_all = since_begin[..., -1:, :]
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        correction = delta[:, :, i] - from_state[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + within[:, :, i] @ correction
        state = state * decay_all[:, :, i] + k[:, :, i].mT @ correction
    return out.movedim((0, 1), (2, 3)).flatten(0, 1), state


@kernel("delta_net", "reference")
def delta_net_reference(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: RecurrentCache, batch: Batch
) -> Tensor:
    """Compute the formula literally, token by token."""
    out = torch.empty_like(v)
    shares = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shares, 1) for x in (q, k))
    q, k, v, decay, beta = (x.to(cache.matrix.dtype) for x in (q, k, v, decay, beta))
    for span in batch.spans:
        state = cache.matrix[span.state_slot].clone()  # [value_heads, key_dim, value_dim]
        for tokens, state_slot in span.split_at_saves():
            for t in range(tokens.start, tokens.stop):
                state = state * decay[t].exp()[:, None, None]
                delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t][:, :, None] * delta[:, None]
                out[t] = torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
            cache.matrix[state_slot] = state
    return out

"""Which drafts of a draft model stand: modified rejection sampling (Leviathan, Kalman and Matias 2023, algorithm
1; Chen et al. 2023, theorem 1). Whatever the proposal was, what is drawn has the target's distribution.

A draft d from q is accepted with probability min(1, p(d) / q(d)); else the token is drawn from max(p - q, 0). That
never gives d, as there q(d) > p(d), so a draft stands exactly where it equals what is drawn.
"""

import torch
from torch import Tensor


def rejection_weights(target: Tensor, draft_probs: Tensor, draft_ids: Tensor, points: Tensor) -> Tensor:
    """What to draw from instead of the target where drafts stand: each draft alone, or the residual.

    target, draft_probs: [N, vocab], in proportion to p and q; draft_ids: [N] int64; points: [N] in [0, 1),
    independent
    of those that drafts were drawn and residuals are drawn by. Returns [N, vocab] in target's dtype, in proportion
    to probabilities.
    """
    p, q = (weights.double() / weights.double().sum(-1, keepdim=True) for weights in (target, draft_probs))
    at = draft_ids[:, None]
    accepted = points[:, None] * q.gather(-1, at) < p.gather(-1, at)
    residual = (p - q).clamp(min=0)
    # Where rounding alone tells p from q nothing may be left of the residual.
    stands = accepted | (residual.sum(-1, keepdim=True) == 0)
    return torch.where(stands, torch.zeros_like(p).scatter(-1, at, 1), residual).to(target.dtype)

"""Logits -> tokens: every row with its own parameters, and the same choice whatever other rows stand beside it.

Order of operations, as in `transformers`: grammar, bias, penalties, temperature, top_k, top_p, min_p. Filters are
thresholds on the value, so that tokens of equal probability are kept or dropped together and the result does not
depend on the order in which a sort leaves them. The draw inverts the cumulative distribution in the order of the
vocabulary at a point that is a function of the row's seed and position alone. Where a draft stands that was itself
drawn, `speculation/acceptance.py` says what is drawn from instead.

This is the reference of `gpu_sampler.py`, which does the same on a GPU while the host goes on.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.request import SamplingParams, TokenLogprob
from localllm.runtime.host_to_device import upload_tensor, upload_values


# Which drafts of a draft model stand: modified rejection sampling (Leviathan, Kalman and Matias 2023, algorithm
# 1; Chen et al. 2023, theorem 1). Whatever the proposal was, what is drawn has the target's distribution.
#
# A draft d from q is accepted with probability min(1, p(d) / q(d)); else the token is drawn from max(p - q, 0).
# That never gives d, as there q(d) > p(d), so a draft stands exactly where it equals what is drawn.
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


# What a grammar is to the engine: which tokens may come next in one answer. Knows nothing of text.
# Waits until they are known: of each position int32 [ceil(vocab / 32)], where bit t % 32 of word t // 32 is set if
# the token t may come; None: any may.
MaskProvider = Callable[[], ListLike[NDArray[np.int32] | None]]


class Constraint(Protocol):
    """One answer's, which it follows by `advance`."""

    @property
    def finished(self) -> bool:
        """Nothing more may come, not even an end token."""
        ...

    @property
    def fault(self) -> LocalLLMError | None:
        """Why it cannot be followed further: then nothing may come, and this answer ends with it."""
        ...

    def begin(self, drafts: ListLike[int]) -> MaskProvider:
        """Begin to find out, while the model computes, what may come at each of the 1 + len(drafts) next
        positions, as if the drafts came. They are allowed."""
        ...

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token, which is allowed."""
        ...

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that spell what alone can come next; the model may still spell it otherwise."""
        ...

    def allowed(self, drafts: ListLike[int]) -> list[int]:
        """The longest beginning of the drafts that may come."""
        ...


# Choices that are no tokens, so that nothing waits for the check.
NOT_FINITE = -1  # the row holds NaN, or infinity
ALL_FORBIDDEN = -2  # every token is forbidden
# What a random number is for: one of a purpose tells nothing about another.
SAMPLE, ACCEPTANCE, DRAFT = 0, 1, 2
TOP_P_CANDIDATES = (
    1024  # likeliest tokens that top_p looks at first; all are sorted only where these do not suffice
)


@dataclass(frozen=True)
class SamplingSpec:
    """What the next token of one sequence is drawn by."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be drawn, counted from the first of the prompt
    token_ids: ListLike[int]  # prompt and answer so far; used by repetition_penalty only
    output_counts: Counter[int]  # of the answer so far; used by presence and frequency penalty only
    history_slot: int = -1  # where its tokens lie on a device that counts them itself
    masks: MaskProvider | None = None  # what a grammar lets come
    draft_index: int = 0  # which of the masks is this row's
    draft_and_probs: tuple[int, Tensor] | None = (
        None  # the draft that stands there and [vocab], what it was drawn from
    )


def sample(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """logits: [N, vocab] float32, changed in place -> [N] int64 token ids, NO_NUMBER or NOTHING_LEFT."""
    apply_grammar(logits, specs)
    apply_penalties(logits, specs)
    best = logits.max(-1)
    choice = best.indices
    drawn = [i for i, row in enumerate(specs) if row.params.temperature > 0]
    if drawn:
        index = upload_values(drawn, torch.int64, logits.device)
        choice[index] = sample_random(logits[index], [specs[i] for i in drawn])
    choice.masked_fill_(best.values == -torch.inf, ALL_FORBIDDEN)
    return choice.masked_fill_(best.values.isnan() | (best.values == torch.inf), NOT_FINITE)


def apply_grammar(logits: Tensor, specs: list[SamplingSpec]) -> None:
    """What a grammar does not let come, in place."""
    for i, row in enumerate(specs):
        if (forbidden := forbidden_tokens(row, logits)) is not None:
            logits[i].masked_fill_(forbidden, -torch.inf)


def forbidden_tokens(spec: SamplingSpec, like: Tensor) -> Tensor | None:
    """[vocab] bool beside `like`, [..., vocab]; None: anything may come."""
    mask = spec.masks()[spec.draft_index] if spec.masks else None
    return (
        None if mask is None else upload_tensor(torch.from_numpy(~unpack_mask(mask, like.shape[-1])), like.device)
    )


def unpack_mask(mask: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """[count] of a mask's bits, the lowest of each word first."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def apply_penalties(logits: Tensor, specs: list[SamplingSpec]) -> None:
    """Bias and penalties, in place."""
    for i, row in enumerate(specs):
        p = row.params
        if p.logit_bias:
            ids = upload_values(list(p.logit_bias), torch.int64, logits.device)
            logits[i, ids] += upload_values(list(p.logit_bias.values()), torch.float32, logits.device)
        if p.repetition_penalty != 1.0 and p.repeat_last_n:
            window = row.token_ids if p.repeat_last_n < 0 else row.token_ids[-p.repeat_last_n :]
            ids = upload_values(list(set(window)), torch.int64, logits.device)
            seen = logits[i, ids]
            logits[i, ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if row.output_counts and (p.presence_penalty or p.frequency_penalty):
            ids = upload_values(list(row.output_counts), torch.int64, logits.device)
            counts = upload_values(list(row.output_counts.values()), torch.int64, logits.device)
            logits[i, ids] -= p.presence_penalty + p.frequency_penalty * counts


def sample_random(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """Temperature, filters and the draw. logits: [N, vocab] of rows whose temperature is above 0 -> [N]"""
    weights = filtered_probabilities(logits, specs)
    proposed = [i for i, row in enumerate(specs) if row.draft_and_probs]
    if proposed:
        index = upload_values(proposed, torch.int64, logits.device)
        weights[index] = rejection_weights_for(weights[index], [specs[i] for i in proposed])
    return invert_cumulative(weights, random_points(specs, SAMPLE, logits.device))


def sample_drafts(logits: Tensor, specs: list[SamplingSpec]) -> tuple[Tensor, Tensor]:
    """A draft model's guesses by the parameters of who will verify them: [N] token ids, and what each was drawn
    from. logits: [N, vocab] float32 of rows whose temperature is above 0, changed in place."""
    apply_penalties(logits, specs)
    weights = filtered_probabilities(logits, specs)
    return invert_cumulative(weights, random_points(specs, DRAFT, logits.device)), weights


def filtered_probabilities(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """[N, vocab] float32, in proportion to the probabilities that temperature and filters leave."""

    def column(values: list[float]) -> Tensor:
        return upload_values(values, torch.float32, logits.device)[:, None]

    # The largest logit becomes 0, so that no temperature above 0 overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([row.params.temperature for row in specs])
    logits = apply_top_k(logits, [row.params.top_k for row in specs])
    top_p = [row.params.top_p for row in specs]
    if min(top_p) < 1:
        logits = logits.masked_fill(logits < top_p_threshold(logits, column(top_p)), -torch.inf)
    probabilities = logits.softmax(-1)
    min_p = column([row.params.min_p for row in specs])
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def rejection_weights_for(weights: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """What rows with a proposal draw from. weights: [N, vocab] of the target"""
    drafts, proposals = [], []
    for row in specs:
        assert row.draft_and_probs
        draft, proposal = row.draft_and_probs
        forbidden = forbidden_tokens(row, weights)
        drafts.append(draft)
        # A draft that a grammar forbids was taken away: one that stands was drawn from the others.
        proposals.append(proposal if forbidden is None else proposal.masked_fill(forbidden, 0))
    index = upload_values(drafts, torch.int64, weights.device)
    return rejection_weights(
        weights, torch.stack(proposals), index, random_points(specs, ACCEPTANCE, weights.device)
    )


def invert_cumulative(weights: Tensor, points: Tensor) -> Tensor:
    """[N] the token of [N, vocab] at which the sum reaches each point of [0, 1)."""
    cumulative = weights.double().cumsum(-1)
    chosen = torch.searchsorted(cumulative, points[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # A point that rounds up to the whole mass lies behind the last possible token, not on a forbidden one.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(chosen, last)


def random_points(specs: list[SamplingSpec], purpose: int, device: torch.device) -> Tensor:
    seeds = upload_values([row.seed for row in specs], torch.int64, device)
    positions = upload_values([row.position for row in specs], torch.int64, device)
    return uniform_random(seeds, positions, purpose)


def apply_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """-inf below each row's k-th largest value; 0 keeps all."""
    vocabulary = logits.shape[-1]
    largest = min(max(top_k), vocabulary)
    if largest == 0:
        return logits
    rank = upload_values([min(k, vocabulary) - 1 for k in top_k], torch.int64, logits.device)
    values = logits.topk(largest).values.gather(-1, rank.clamp(min=0)[:, None])
    return logits.masked_fill((logits < values) & (rank >= 0)[:, None], -torch.inf)


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """[N, 1] the smallest logit of each row's nucleus; -inf for rows with top_p = 1."""
    total = logits.logsumexp(-1, keepdim=True)
    # A device that works on by itself is not asked whether they suffice: the host would have to wait for it.
    count = min(TOP_P_CANDIDATES, logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[-1]
    values = logits.topk(count).values
    cumulative = (values - total).exp().cumsum(-1)
    if count < logits.shape[-1] and not bool(((cumulative[:, -1:] >= top_p) | (top_p >= 1)).all()):
        values = logits.sort(descending=True).values
        cumulative = (values - total).exp().cumsum(-1)
    # The nucleus ends with the first token at which the sum reaches top_p.
    size = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    return values.gather(-1, size).masked_fill(top_p >= 1, -torch.inf)


def uniform_random(seeds: Tensor, positions: Tensor, purpose: int = SAMPLE) -> Tensor:
    """[N] float64 in [0, 1), a function of seed, position and purpose alone: the finalizer of SplitMix64 (Steele,
    Lea and Flood 2014) over them, top 53 bits."""
    mixed = splitmix64_finalize(
        splitmix64_finalize(seeds ^ purpose << 60) + (positions + 1) * as_int64(0x9E3779B97F4A7C15)
    )
    return ((mixed >> 11) & (2**53 - 1)).double() * 2.0**-53


def splitmix64_finalize(z: Tensor) -> Tensor:
    z = (z ^ logical_shift_right(z, 30)) * as_int64(0xBF58476D1CE4E5B9)
    z = (z ^ logical_shift_right(z, 27)) * as_int64(0x94D049BB133111EB)
    return z ^ logical_shift_right(z, 31)


def logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def as_int64(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - 2**64 if value >= 2**63 else value


def compute_logprobs(logits: Tensor, token_ids: Tensor, top_counts: list[int]) -> list[TokenLogprob]:
    """The model's own distribution (before bias, penalties and temperature) at each position.

    logits: [N, vocab] float32; token_ids: [N], what stands there; top_counts: how many alternatives each row
    wants.
    """
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, token_ids[:, None])[:, 0].tolist()
    top = logs.topk(min(max(top_counts), logits.shape[-1]))
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token, logprob, ids, logprobs, count in zip(
            token_ids.tolist(), chosen, indices, values, top_counts, strict=True
        )
    ]

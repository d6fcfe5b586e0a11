"""Logits -> tokens: every row with its own parameters, and the same choice whatever other rows stand beside it.

Order of operations, as in `transformers`: grammar, bias, penalties, temperature, top_k, top_p, min_p. Filters are
thresholds on the value, so that tokens of equal probability are kept or dropped together and the result does not
depend on the order in which a sort leaves them. The draw inverts the cumulative distribution in the order of the
vocabulary at a point that is a function of the row's seed and position alone. Where a draft stands that was itself
drawn, `speculation/acceptance.py` says what is drawn from instead.

This is the reference of `draws.py`, which does the same on a GPU while the host goes on.
"""

from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localllm.request import SamplingParams, TokenLogprob
from localllm.runtime.constraint import Masks
from localllm.runtime.sent import moved, sent
from localllm.runtime.speculation.acceptance import verified

# Choices that are no tokens, so that nothing waits for the check.
NO_NUMBER = -1  # the row holds NaN, or infinity
NOTHING_LEFT = -2  # every token is forbidden
# What a random number is for: one of a purpose tells nothing about another.
CHOICE, ACCEPTANCE, PROPOSAL = 0, 1, 2
CANDIDATES = 1024  # likeliest tokens that top_p looks at first; all are sorted only where these do not suffice


@dataclass(frozen=True)
class Row:
    """What the next token of one sequence is drawn by."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be drawn, counted from the first of the prompt
    token_ids: ListLike[int]  # prompt and answer so far; used by repetition_penalty only
    output_counts: Counter[int]  # of the answer so far; used by presence and frequency penalty only
    history: int = -1  # where its tokens lie on a device that counts them itself
    masks: Masks | None = None  # what a grammar lets come
    place: int = 0  # which of the masks is this row's
    proposal: tuple[int, Tensor] | None = None  # the draft that stands there and [vocab], what it was drawn from


def sample(logits: Tensor, rows: list[Row]) -> Tensor:
    """logits: [N, vocab] float32, changed in place -> [N] int64 token ids, NO_NUMBER or NOTHING_LEFT."""
    forbid(logits, rows)
    adjust(logits, rows)
    best = logits.max(-1)
    choice = best.indices
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        index = sent(drawn, torch.int64, logits.device)
        choice[index] = draw(logits[index], [rows[i] for i in drawn])
    choice.masked_fill_(best.values == -torch.inf, NOTHING_LEFT)
    return choice.masked_fill_(best.values.isnan() | (best.values == torch.inf), NO_NUMBER)


def forbid(logits: Tensor, rows: list[Row]) -> None:
    """What a grammar does not let come, in place."""
    for i, row in enumerate(rows):
        if (forbidden := forbidden_by_grammar(row, logits)) is not None:
            logits[i].masked_fill_(forbidden, -torch.inf)


def forbidden_by_grammar(row: Row, like: Tensor) -> Tensor | None:
    """[vocab] bool beside `like`, [..., vocab]; None: anything may come."""
    mask = row.masks()[row.place] if row.masks else None
    return None if mask is None else moved(torch.from_numpy(~bits(mask, like.shape[-1])), like.device)


def bits(mask: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """[count] of a mask's bits, the lowest of each word first."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def adjust(logits: Tensor, rows: list[Row]) -> None:
    """Bias and penalties, in place."""
    for i, row in enumerate(rows):
        p = row.params
        if p.logit_bias:
            ids = sent(list(p.logit_bias), torch.int64, logits.device)
            logits[i, ids] += sent(list(p.logit_bias.values()), torch.float32, logits.device)
        if p.repetition_penalty != 1.0 and p.repeat_last_n:
            window = row.token_ids if p.repeat_last_n < 0 else row.token_ids[-p.repeat_last_n :]
            ids = sent(list(set(window)), torch.int64, logits.device)
            seen = logits[i, ids]
            logits[i, ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        if row.output_counts and (p.presence_penalty or p.frequency_penalty):
            ids = sent(list(row.output_counts), torch.int64, logits.device)
            counts = sent(list(row.output_counts.values()), torch.int64, logits.device)
            logits[i, ids] -= p.presence_penalty + p.frequency_penalty * counts


def draw(logits: Tensor, rows: list[Row]) -> Tensor:
    """Temperature, filters and the draw. logits: [N, vocab] of rows whose temperature is above 0 -> [N]"""
    weights = distribution(logits, rows)
    proposed = [i for i, row in enumerate(rows) if row.proposal]
    if proposed:
        index = sent(proposed, torch.int64, logits.device)
        weights[index] = verify(weights[index], [rows[i] for i in proposed])
    return pick(weights, points(rows, CHOICE, logits.device))


def propose(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """A draft model's guesses by the parameters of who will verify them: [N] token ids, and what each was drawn
    from. logits: [N, vocab] float32 of rows whose temperature is above 0, changed in place."""
    adjust(logits, rows)
    weights = distribution(logits, rows)
    return pick(weights, points(rows, PROPOSAL, logits.device)), weights


def distribution(logits: Tensor, rows: list[Row]) -> Tensor:
    """[N, vocab] float32, in proportion to the probabilities that temperature and filters leave."""

    def column(values: list[float]) -> Tensor:
        return sent(values, torch.float32, logits.device)[:, None]

    # The largest logit becomes 0, so that no temperature above 0 overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([row.params.temperature for row in rows])
    logits = keep_top_k(logits, [row.params.top_k for row in rows])
    top_p = [row.params.top_p for row in rows]
    if min(top_p) < 1:
        logits = logits.masked_fill(logits < top_p_threshold(logits, column(top_p)), -torch.inf)
    probabilities = logits.softmax(-1)
    min_p = column([row.params.min_p for row in rows])
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def verify(weights: Tensor, rows: list[Row]) -> Tensor:
    """What rows with a proposal draw from. weights: [N, vocab] of the target"""
    drafts, proposals = [], []
    for row in rows:
        assert row.proposal
        draft, proposal = row.proposal
        forbidden = forbidden_by_grammar(row, weights)
        drafts.append(draft)
        # A draft that a grammar forbids was taken away: one that stands was drawn from the others.
        proposals.append(proposal if forbidden is None else proposal.masked_fill(forbidden, 0))
    index = sent(drafts, torch.int64, weights.device)
    return verified(weights, torch.stack(proposals), index, points(rows, ACCEPTANCE, weights.device))


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """[N] the token of [N, vocab] at which the sum reaches each point of [0, 1)."""
    cumulative = weights.double().cumsum(-1)
    chosen = torch.searchsorted(cumulative, points[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # A point that rounds up to the whole mass lies behind the last possible token, not on a forbidden one.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(chosen, last)


def points(rows: list[Row], purpose: int, device: torch.device) -> Tensor:
    seeds = sent([row.seed for row in rows], torch.int64, device)
    positions = sent([row.position for row in rows], torch.int64, device)
    return uniform(seeds, positions, purpose)


def keep_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """-inf below each row's k-th largest value; 0 keeps all."""
    vocabulary = logits.shape[-1]
    largest = min(max(top_k), vocabulary)
    if largest == 0:
        return logits
    rank = sent([min(k, vocabulary) - 1 for k in top_k], torch.int64, logits.device)
    values = logits.topk(largest).values.gather(-1, rank.clamp(min=0)[:, None])
    return logits.masked_fill((logits < values) & (rank >= 0)[:, None], -torch.inf)


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """[N, 1] the smallest logit of each row's nucleus; -inf for rows with top_p = 1."""
    total = logits.logsumexp(-1, keepdim=True)
    # A device that works on by itself is not asked whether they suffice: the host would have to wait for it.
    count = min(CANDIDATES, logits.shape[-1]) if logits.device.type == "cpu" else logits.shape[-1]
    values = logits.topk(count).values
    cumulative = (values - total).exp().cumsum(-1)
    if count < logits.shape[-1] and not bool(((cumulative[:, -1:] >= top_p) | (top_p >= 1)).all()):
        values = logits.sort(descending=True).values
        cumulative = (values - total).exp().cumsum(-1)
    # The nucleus ends with the first token at which the sum reaches top_p.
    size = (cumulative < top_p).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    return values.gather(-1, size).masked_fill(top_p >= 1, -torch.inf)


def uniform(seeds: Tensor, positions: Tensor, purpose: int = CHOICE) -> Tensor:
    """[N] float64 in [0, 1), a function of seed, position and purpose alone: the finalizer of SplitMix64 (Steele,
    Lea and Flood 2014) over them, top 53 bits."""
    mixed = finalize(finalize(seeds ^ purpose << 60) + (positions + 1) * signed(0x9E3779B97F4A7C15))
    return ((mixed >> 11) & (2**53 - 1)).double() * 2.0**-53


def finalize(z: Tensor) -> Tensor:
    z = (z ^ shift_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - 2**64 if value >= 2**63 else value


def log_probabilities(logits: Tensor, token_ids: Tensor, counts: list[int]) -> list[TokenLogprob]:
    """The model's own distribution (before bias, penalties and temperature) at each position.

    logits: [N, vocab] float32; token_ids: [N], what stands there; counts: how many alternatives each row wants.
    """
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, token_ids[:, None])[:, 0].tolist()
    top = logs.topk(min(max(counts), logits.shape[-1]))
    values, indices = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token, logprob, ids, logprobs, count in zip(
            token_ids.tolist(), chosen, indices, values, counts, strict=True
        )
    ]

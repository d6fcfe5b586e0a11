"""Logits to tokens: each row has its own parameters, and its choice does not depend on the other rows.

Order of operations, as in `transformers`: grammar, min_tokens, bias, penalties, temperature, top_k, top_p, min_p.
Filters are thresholds on the value, so that tokens of equal probability are kept or dropped together and the
result does not depend on the order in which a sort leaves them. Sampling inverts the cumulative distribution, in
the order of the vocabulary, at a point that is a function of the row's seed and position alone. For a draft that
was itself sampled, `rejection_weights` replaces the distribution.

This is the reference of `gpu_sampler.py`, which does the same on a GPU without blocking the host.
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
from localllm.runtime.batch import upload_tensor, upload_values

# Sampled values that are not tokens, so that the device need not wait for a check.
NOT_FINITE = -1  # the row contains NaN or infinity
ALL_FORBIDDEN = -2  # every token is forbidden
# Purposes of random numbers: those of one purpose are independent of the others.
SAMPLE, ACCEPTANCE, DRAFT = 0, 1, 2
TOP_P_CANDIDATES = 1024  # likeliest tokens considered for top_p first; all are sorted only if these do not suffice
# Waits for a grammar's masks, one per position: int32 [ceil(vocab / 32)], where bit t % 32 of word t // 32 is set
# if token t is allowed; None: all are.
MaskProvider = Callable[[], ListLike[NDArray[np.int32] | None]]


class Constraint(Protocol):
    """The grammar of one answer as the engine sees it: the tokens that are allowed next. `advance` follows its
    tokens.
    """

    @property
    def cut(self) -> bool:
        """Was the answer ended because it has no room left?"""
        ...

    @property
    def finished(self) -> bool:
        """Whether the grammar is complete, so that no token may follow, not even an end token."""
        ...

    @property
    def fault(self) -> LocalLLMError | None:
        """Why the grammar cannot be followed further; the answer then ends with this error."""
        ...

    def begin(self, drafts: ListLike[int]) -> MaskProvider:
        """Start computing the masks of the 1 + len(drafts) next positions while the model runs.

        drafts: allowed tokens, which the masks after them assume to be accepted.
        """
        ...

    def advance(self, token_id: int) -> None:
        """Append an allowed token to the answer."""
        ...

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that spell the only possible continuation; the model may spell it
        differently.
        """
        ...

    def allowed(self, drafts: ListLike[int]) -> list[int]:
        """Return the longest prefix of the drafts that the grammar allows."""
        ...


@dataclass(slots=True)  # not frozen, as `TokenEvent`
class SamplingSpec:
    """Parameters for sampling the next token of one sequence."""

    params: SamplingParams
    seed: int
    position: int  # of the sampled token, counted from the first token of the prompt
    token_ids: ListLike[int]  # prompt and answer so far; used by repetition_penalty only
    output_counts: Counter[int]  # of the answer so far; used by presence and frequency penalty only
    history_slot: int = -1  # history slot on a device that computes penalties itself
    masks: MaskProvider | None = None  # of a grammar
    draft_index: int = 0  # index of this row's mask
    forbidden_ids: tuple[int, ...] = ()  # end tokens, before min_tokens; ignored if a grammar allows nothing else
    draft_and_probs: tuple[int, Tensor] | None = None  # a sampled draft and its distribution [vocab]


def sample(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """Sample a token per row. logits: [N, vocab] float32, modified in place.

    Returns [N] int64 token ids, or NOT_FINITE or ALL_FORBIDDEN.
    """
    apply_masks(logits, specs)
    apply_penalties(logits, specs)
    best = logits.max(-1)
    choice = best.indices
    random_rows = [i for i, spec in enumerate(specs) if spec.params.temperature > 0]
    if random_rows:
        index = upload_values(random_rows, torch.int64, logits.device)
        choice[index] = sample_random(logits[index], [specs[i] for i in random_rows])
    choice.masked_fill_(best.values == -torch.inf, ALL_FORBIDDEN)
    return choice.masked_fill_(best.values.isnan() | (best.values == torch.inf), NOT_FINITE)


def apply_masks(logits: Tensor, specs: list[SamplingSpec]) -> None:
    """Set the logits of tokens that a grammar or min_tokens forbids to -inf, in place."""
    for i, spec in enumerate(specs):
        if (forbidden := forbidden_tokens(spec, logits)) is not None:
            logits[i].masked_fill_(forbidden, -torch.inf)


def forbidden_tokens(spec: SamplingSpec, like: Tensor) -> Tensor | None:
    """Return [vocab] bool on the device of `like` [..., vocab]; None: all tokens are allowed."""
    mask = spec.masks()[spec.draft_index] if spec.masks else None
    vocab_size = like.shape[-1]
    forbidden_ids = [token for token in spec.forbidden_ids if token < vocab_size]
    if mask is None and not forbidden_ids:
        return None
    forbidden = np.zeros(vocab_size, np.bool_) if mask is None else ~unpack_mask(mask, vocab_size)
    if forbidden_ids:
        with_end_tokens = forbidden.copy()
        with_end_tokens[forbidden_ids] = True
        if mask is None or not with_end_tokens.all():  # a grammar that can only end wins
            forbidden = with_end_tokens
    return upload_tensor(torch.from_numpy(forbidden), like.device)


def unpack_mask(mask: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """Unpack the first `count` bits of a mask, the lowest of each word first."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").view(np.bool_)


def apply_penalties(logits: Tensor, specs: list[SamplingSpec]) -> None:
    """Apply logit_bias and penalties in place."""
    for i, spec in enumerate(specs):
        params = spec.params
        if params.logit_bias:
            ids = upload_values(list(params.logit_bias), torch.int64, logits.device)
            logits[i, ids] += upload_values(list(params.logit_bias.values()), torch.float32, logits.device)
        if params.repetition_penalty != 1.0 and params.repeat_last_n:
            window = spec.token_ids if params.repeat_last_n < 0 else spec.token_ids[-params.repeat_last_n :]
            ids = upload_values(list(set(window)), torch.int64, logits.device)
            penalized = logits[i, ids]
            logits[i, ids] = torch.where(
                penalized > 0, penalized / params.repetition_penalty, penalized * params.repetition_penalty
            )
        if spec.output_counts and (params.presence_penalty or params.frequency_penalty):
            ids = upload_values(list(spec.output_counts), torch.int64, logits.device)
            counts = upload_values(list(spec.output_counts.values()), torch.int64, logits.device)
            logits[i, ids] -= params.presence_penalty + params.frequency_penalty * counts


def sample_random(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """Apply temperature and filters, then sample. logits: [N, vocab] of rows with temperature > 0 -> [N]"""
    weights = filtered_probabilities(logits, specs)
    drafted_rows = [i for i, spec in enumerate(specs) if spec.draft_and_probs]
    if drafted_rows:
        index = upload_values(drafted_rows, torch.int64, logits.device)
        weights[index] = rejection_weights_for(weights[index], [specs[i] for i in drafted_rows])
    return invert_cumulative(weights, random_points(specs, SAMPLE, logits.device))


def sample_drafts(logits: Tensor, specs: list[SamplingSpec]) -> tuple[Tensor, Tensor]:
    """Sample the drafts of a draft model, with the parameters of the sequences that verify them.

    logits: [N, vocab] float32 of rows with temperature > 0, modified in place. Returns [N] token ids and the
    weights [N, vocab] that they were sampled from.
    """
    apply_masks(logits, specs)
    apply_penalties(logits, specs)
    weights = filtered_probabilities(logits, specs)
    return invert_cumulative(weights, random_points(specs, DRAFT, logits.device)), weights


def filtered_probabilities(logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """Return [N, vocab] float32, proportional to the probabilities after temperature and filters."""

    def column(values: list[float]) -> Tensor:
        return upload_values(values, torch.float32, logits.device)[:, None]

    # The largest logit becomes 0, so that no temperature above 0 overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([spec.params.temperature for spec in specs])
    logits = apply_top_k(logits, [spec.params.top_k for spec in specs])
    top_p = [spec.params.top_p for spec in specs]
    if min(top_p) < 1:
        logits = logits.masked_fill(logits < top_p_threshold(logits, column(top_p)), -torch.inf)
    probabilities = logits.softmax(-1)
    min_p = column([spec.params.min_p for spec in specs])
    return probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0)


def rejection_weights_for(weights: Tensor, specs: list[SamplingSpec]) -> Tensor:
    """Return the weights to sample from for rows with a sampled draft. weights: [N, vocab] of the target"""
    drafts, proposals = [], []
    for spec in specs:
        assert spec.draft_and_probs
        draft, proposal = spec.draft_and_probs
        forbidden = forbidden_tokens(spec, weights)
        drafts.append(draft)
        # The drafter skips forbidden drafts, so that one that stands was sampled from the allowed tokens.
        proposals.append(proposal if forbidden is None else proposal.masked_fill(forbidden, 0))
    index = upload_values(drafts, torch.int64, weights.device)
    return rejection_weights(
        weights, torch.stack(proposals), index, random_points(specs, ACCEPTANCE, weights.device)
    )


def rejection_weights(target: Tensor, draft_probs: Tensor, draft_ids: Tensor, points: Tensor) -> Tensor:
    """Return weights to sample from at drafts of a draft model: the draft alone if accepted, otherwise the
    residual.

    Modified rejection sampling (Leviathan, Kalman and Matias 2023, algorithm 1; Chen et al. 2023, theorem 1): for
    any proposal, the sampled token has the target's distribution. A draft d from q is accepted with probability
    min(1, p(d) / q(d)); otherwise the token is sampled from max(p - q, 0), which never yields d because q(d) >
    p(d). So a draft is accepted exactly if it equals the sampled token.

    target, draft_probs: [N, vocab], proportional to p and q; draft_ids: [N] int64; points: [N] in [0, 1),
    independent of the points that drafts and residuals are sampled with. Returns [N, vocab] in target's dtype,
    proportional to probabilities.
    """
    p, q = (weights.double() / weights.double().sum(-1, keepdim=True) for weights in (target, draft_probs))
    draft_index = draft_ids[:, None]
    accepted = points[:, None] * q.gather(-1, draft_index) < p.gather(-1, draft_index)
    residual = (p - q).clamp(min=0)
    # If p and q differ only by rounding, the residual may be empty.
    stands = accepted | (residual.sum(-1, keepdim=True) == 0)
    return torch.where(stands, torch.zeros_like(p).scatter(-1, draft_index, 1), residual).to(target.dtype)


def invert_cumulative(weights: Tensor, points: Tensor) -> Tensor:
    """Return the token [N] of weights [N, vocab] at which the cumulative sum reaches each point of [0, 1)."""
    cumulative = weights.double().cumsum(-1)
    chosen = torch.searchsorted(cumulative, points[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # A point that rounds up to the total mass selects the last possible token, not a forbidden one behind it.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(chosen, last)


def random_points(specs: list[SamplingSpec], purpose: int, device: torch.device) -> Tensor:
    """Return [N] float64 random numbers in [0, 1) for the rows."""
    seeds = upload_values([spec.seed for spec in specs], torch.int64, device)
    positions = upload_values([spec.position for spec in specs], torch.int64, device)
    return uniform_random(seeds, positions, purpose)


def apply_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """Set logits below each row's k-th largest to -inf; k = 0 keeps all."""
    vocabulary = logits.shape[-1]
    largest = min(max(top_k), vocabulary)
    if largest == 0:
        return logits
    rank = upload_values([min(k, vocabulary) - 1 for k in top_k], torch.int64, logits.device)
    values = logits.topk(largest).values.gather(-1, rank.clamp(min=0)[:, None])
    return logits.masked_fill((logits < values) & (rank >= 0)[:, None], -torch.inf)


def top_p_threshold(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit [N, 1] of each row's nucleus; -inf for rows with top_p = 1."""
    total = logits.logsumexp(-1, keepdim=True)
    # On an asynchronous device, checking whether they suffice would make the host wait.
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
    """Return [N] float64 in [0, 1), a function of seed, position and purpose alone.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014) is applied to them, and its top 53 bits are used.
    """
    mixed = splitmix64_finalize(
        splitmix64_finalize(seeds ^ purpose << 60) + (positions + 1) * as_int64(0x9E3779B97F4A7C15)
    )
    return ((mixed >> 11) & (2**53 - 1)).double() * 2.0**-53


def splitmix64_finalize(z: Tensor) -> Tensor:
    z = (z ^ logical_shift_right(z, 30)) * as_int64(0xBF58476D1CE4E5B9)
    z = (z ^ logical_shift_right(z, 27)) * as_int64(0x94D049BB133111EB)
    return z ^ logical_shift_right(z, 31)


def logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift logically; torch shifts arithmetically."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def as_int64(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit integer."""
    return value - 2**64 if value >= 2**63 else value


def logprob_table(logs: Tensor, token_ids: Tensor, top_count: int) -> Tensor:
    """Return the log probabilities of tokens and of the likeliest tokens in one tensor, which is one copy to the
    host.

    logs: [N, vocab] float32, log probabilities under the model's own distribution (before bias, penalties and
    temperature); token_ids: [N] int64, where values below 0 are errors instead of tokens. Returns [N, 1 + 2 * k]
    float64, which represents all values exactly: of the token, of the k likeliest, and the ids of those.
    """
    chosen = logs.gather(-1, token_ids.clamp(min=0)[:, None])
    top = logs.topk(min(top_count, logs.shape[-1]))
    return torch.cat([part.double() for part in (chosen, top.values, top.indices)], -1)


def parse_logprobs(table: Tensor, token_ids: ListLike[int], top_counts: ListLike[int]) -> list[TokenLogprob]:
    """Return the rows of a `logprob_table` on the host. top_counts: alternatives that each row requests"""
    count = table.shape[-1] // 2
    results = []
    for token, row, most in zip(token_ids, table.tolist(), top_counts, strict=True):
        values, ids = row[1 : 1 + count][:most], map(int, row[1 + count :][:most])
        results.append(TokenLogprob(token, row[0], tuple(zip(ids, values, strict=True))))
    return results

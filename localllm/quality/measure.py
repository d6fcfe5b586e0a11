"""How far one model's next tokens are from another's: each number, from the logits of both over a text.

Knows nothing of models: a model is a function from the token ids of a window to logits. What is kept of a position
are five numbers; of logits a piece of each model is alive at a time, and a few rows of it in float64.

With p and q the probabilities of reference and other (softmax of the logits) and y the token that does follow:

    perplexity     exp(mean of -ln p(y)), as llama.cpp, transformers and the literature have it
    log ratio      mean of ln p(y) - ln q(y), which is ln(other's perplexity / reference's)
    KL divergence  sum over all tokens v of p(v) (ln p(v) - ln q(v)), in nats, never below 0
    same top       share of positions with argmax p = argmax q
    right token    mean of q(y) - p(y), and the root of its mean square

Errors are standard errors of the mean, sqrt(variance / positions), with the variance of a sample; of a perplexity,
perplexity times that of its logarithm. That of the log ratio is of the differences, position by position: what is
hard in the text is hard for both, and leaves it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.quality.report import Distance, Divergence, Estimate
from localllm.quality.text import Windows

CHUNK_ELEMENTS = 2**20  # logits that are looked at at once: 8 MiB in float64, and some copies
PERCENT = 99

LogitsFunction = Callable[[Sequence[int]], Iterable[Tensor]]
"""Token ids of a window -> the logits of its tokens, float32 [n, vocab], in one piece or several that follow each
other; both models in the same pieces. Each row sees the tokens up to its own."""


@dataclass(frozen=True)
class PositionScores:
    """Numbers of each scored position, [positions] float64 on the CPU."""

    reference_logprob: Tensor  # of the token that follows
    other_logprob: Tensor
    divergence: Tensor
    same_top: Tensor  # 1 or 0


def measure_distance(reference: LogitsFunction, other: LogitsFunction, windows: Windows) -> Distance:
    """Raises LocalLLMError where a model computes NaN or infinity."""
    found = [rows for ids in windows.ids for rows in score_window(reference, other, ids, windows.first_scored)]
    columns = zip(*(vars(rows).values() for rows in found), strict=True)
    return summarize(PositionScores(*(torch.cat(column) for column in columns)))


@torch.inference_mode()
def score_window(
    reference: LogitsFunction, other: LogitsFunction, ids: Sequence[int], first: int
) -> list[PositionScores]:
    """One window, a few rows after another. first: the first token that is scored, from 1."""
    found, start = [], 0
    for ours, theirs in zip(reference(ids), other(ids), strict=True):
        if ours.shape != theirs.shape:
            raise ValueError(f"logits of {list(ours.shape)} and of {list(theirs.shape)} cannot be compared")
        begin, end = max(start, first - 1), min(start + len(ours), len(ids) - 1)
        step = max(1, CHUNK_ELEMENTS // ours.shape[-1])
        for at in range(begin, end, step):
            rows = slice(at - start, min(at + step, end) - start)
            targets = torch.tensor(ids[at + 1 : at + 1 + rows.stop - rows.start])
            found.append(score_rows(ours[rows], theirs[rows], targets))
        start += len(ours)
    if start != len(ids):
        raise ValueError(f"{len(ids)} tokens got {start} rows of logits")
    return found


def score_rows(reference: Tensor, other: Tensor, targets: Tensor) -> PositionScores:
    """logits of both, [n, vocab]; targets: [n], the token that follows each row."""
    targets = targets.to(other.device)[:, None]
    ours = log_probabilities(reference.to(other.device), "the reference")
    theirs = log_probabilities(other, "the other model")
    divergence = (ours.exp() * (ours - theirs)).sum(-1)
    return PositionScores(
        ours.gather(-1, targets)[:, 0].cpu(),
        theirs.gather(-1, targets)[:, 0].cpu(),
        divergence.clamp(min=0).cpu(),  # rounding alone takes it below
        (reference.argmax(-1).to(other.device) == other.argmax(-1)).double().cpu(),
    )


def log_probabilities(logits: Tensor, model_name: str) -> Tensor:
    """[n, vocab] float64. Raises LocalLLMError for logits that are not finite; `model_name` is for the message."""
    if not all(map(math.isfinite, logits.aminmax())):
        raise LocalLLMError(f"{model_name} computed NaN or infinity", "try --dtype float32")
    return logits.double().log_softmax(-1)


def summarize(positions: PositionScores) -> Distance:
    """The numbers of two positions or more."""
    ours, theirs, divergence = positions.reference_logprob, positions.other_logprob, positions.divergence
    change = theirs.exp() - ours.exp()
    return Distance(
        reference_perplexity=estimate_perplexity(ours),
        other_perplexity=estimate_perplexity(theirs),
        log_ratio=estimate_mean(ours - theirs),
        divergence=Divergence(
            estimate_mean(divergence),
            divergence.quantile(0.5).item(),
            divergence.quantile(PERCENT / 100).item(),
            divergence.max().item(),
        ),
        same_top=estimate_mean(positions.same_top),
        right_token=estimate_mean(change),
        right_token_rms=change.square().mean().sqrt().item(),
    )


def estimate_mean(values: Tensor) -> Estimate:
    return Estimate(values.mean().item(), (values.std() / math.sqrt(len(values))).item())


def estimate_perplexity(logprobs: Tensor) -> Estimate:
    """Of the tokens that do follow."""
    nats = estimate_mean(-logprobs)
    return Estimate(math.exp(nats.value), math.exp(nats.value) * nats.error)


def output_error(reference: Tensor, other: Tensor) -> float:
    """Mean over tokens of |other - reference| / |reference|, [T, width]: a few tokens of huge norm, as the first
    often is, count no more than the others."""
    ours = reference.double()
    lengths = ours.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return ((other.to(ours.device).double() - ours).norm(dim=-1) / lengths).mean().item()

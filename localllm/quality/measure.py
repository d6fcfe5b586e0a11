"""Measures how far one model's next-token probabilities are from another's, from the logits of both over a text.

Independent of models: a model is a function from a window's token ids to logits. Only five numbers per position
are stored; at any time one piece of logits per model is in memory, and a few of its rows in float64.

With p and q the probabilities of reference and other (softmax of the logits) and y the token that actually
follows:

    perplexity     exp(mean of -ln p(y)), as in llama.cpp, transformers and the literature
    log ratio      mean of ln p(y) - ln q(y), which is ln(other's perplexity / reference's)
    KL divergence  sum over all tokens v of p(v) (ln p(v) - ln q(v)), in nats, never below 0
    same top       share of positions with argmax p = argmax q
    right token    mean of q(y) - p(y), and the root of its mean square

Errors are standard errors of the mean, sqrt(variance / positions), with the sample variance; that of a perplexity
is the perplexity times the error of its logarithm. The log ratio's error is computed from the differences by
position: difficult positions affect both models and cancel out.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from localllm.errors import DiskFull, LocalLLMError
from localllm.files import explain_disk_errors
from localllm.formatting import format_bytes
from localllm.quality.report import Distance, Divergence, Estimate
from localllm.quality.text import Windows

CHUNK_ELEMENTS = 2**20  # logits processed at once: 8 MiB in float64, and some copies
PERCENT = 99

LogitsFunction = Callable[[Sequence[int]], Iterable[Tensor]]
"""Maps token ids of a window to the logits of its tokens, float32 [n, vocab], in one or more consecutive pieces,
split equally for both models. Each row depends on the tokens up to its own."""
LOGIT_BYTES = 4  # per logit


@dataclass(frozen=True)
class PositionScores:
    """Values of each scored position, [positions] float64 on the CPU."""

    reference_logprob: Tensor  # of the next token
    other_logprob: Tensor
    divergence: Tensor
    same_top: Tensor  # 1 or 0


def measure_distance(reference: LogitsFunction, other: LogitsFunction, windows: Windows) -> Distance:
    """Raises LocalLLMError if a model computes NaN or infinity."""
    chunks = [chunk for ids in windows.ids for chunk in score_window(reference, other, ids, windows.first_scored)]
    columns = zip(*(vars(chunk).values() for chunk in chunks), strict=True)
    return summarize(PositionScores(*(torch.cat(column) for column in columns)))


@torch.inference_mode()
def score_window(
    reference: LogitsFunction, other: LogitsFunction, ids: Sequence[int], first: int
) -> list[PositionScores]:
    """Score one window, a few rows at a time. first: index of the first scored token, from 1."""
    chunks, start = [], 0
    for reference_values, other_values in zip(reference(ids), other(ids), strict=True):
        if reference_values.shape != other_values.shape:
            raise ValueError(
                f"logits of {list(reference_values.shape)} and of {list(other_values.shape)} cannot be compared"
            )
        begin, end = max(start, first - 1), min(start + len(reference_values), len(ids) - 1)
        step = max(1, CHUNK_ELEMENTS // reference_values.shape[-1])
        for position in range(begin, end, step):
            rows = slice(position - start, min(position + step, end) - start)
            targets = torch.tensor(ids[position + 1 : position + 1 + rows.stop - rows.start])
            chunks.append(score_rows(reference_values[rows], other_values[rows], targets))
        start += len(reference_values)
    if start != len(ids):
        raise ValueError(f"{len(ids)} tokens got {start} rows of logits")
    return chunks


def score_rows(reference: Tensor, other: Tensor, targets: Tensor) -> PositionScores:
    """Score rows of both logits, [n, vocab]; targets: [n], the token after each row."""
    targets = targets.to(other.device)[:, None]
    reference_values = log_probabilities(reference.to(other.device), "the reference")
    other_values = log_probabilities(other, "the other model")
    divergence = (reference_values.exp() * (reference_values - other_values)).sum(-1)
    return PositionScores(
        reference_values.gather(-1, targets)[:, 0].cpu(),
        other_values.gather(-1, targets)[:, 0].cpu(),
        divergence.clamp(min=0).cpu(),  # negative only by rounding
        (reference.argmax(-1).to(other.device) == other.argmax(-1)).double().cpu(),
    )


def log_probabilities(logits: Tensor, model_name: str) -> Tensor:
    """Return [n, vocab] float64.

    Raises LocalLLMError for logits that are not finite; `model_name` is for the message.
    """
    if not all(map(math.isfinite, logits.aminmax())):
        raise LocalLLMError(f"{model_name} computed NaN or infinity", "try --dtype float32")
    return logits.double().log_softmax(-1)


def summarize(positions: PositionScores) -> Distance:
    """Return the results for two positions or more."""
    reference_values, other_values, divergence = (
        positions.reference_logprob,
        positions.other_logprob,
        positions.divergence,
    )
    change = other_values.exp() - reference_values.exp()
    return Distance(
        reference_perplexity=estimate_perplexity(reference_values),
        other_perplexity=estimate_perplexity(other_values),
        log_ratio=estimate_mean(reference_values - other_values),
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
    """Estimate from the log probabilities of the actual next tokens."""
    nats = estimate_mean(-logprobs)
    return Estimate(math.exp(nats.value), math.exp(nats.value) * nats.error)


def output_error(reference: Tensor, other: Tensor) -> float:
    """Return the mean over tokens of |other - reference| / |reference|, [T, width]: tokens of very large norm,
    such as often the first, count no more than others.
    """
    reference_values = reference.double()
    lengths = reference_values.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return ((other.to(reference_values.device).double() - reference_values).norm(dim=-1) / lengths).mean().item()


@contextmanager
def open_logits_file(folder: Path, needed: int) -> Iterator["LogitsFile"]:
    """Open a file that is removed at the end, even after a crash. needed: bytes, see `logits_bytes`. Raises
    DiskFull if fewer are free.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(
            f"the logits of one model take {format_bytes(needed)} in {folder}, "
            f"which has {format_bytes(free)} free",
            "give fewer --tokens, or free memory for both models at once",
        )
    with tempfile.TemporaryFile(dir=folder, prefix="logits-") as file:
        yield LogitsFile(file, folder)


class LogitsFile:
    """The recorded logits of a model in a temporary file, as a `LogitsFunction`.

    It replaces the first of two models that do not fit into memory together, while the second computes. The logits
    are stored exactly.
    """

    def __init__(self, file: IO[bytes], folder: Path):
        self.file = file
        self.folder = folder  # containing the file, for error messages
        # Offset and shape of each piece, by window.
        self.offsets: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}

    def record(self, logits: LogitsFunction, windows: Windows) -> None:
        """Compute and store the logits of all windows. Raises DiskFull if the disk becomes full."""
        for ids in windows.ids:
            pieces = self.offsets[ids] = []
            for piece in logits(ids):
                pieces.append((self.file.tell(), tuple(piece.shape)))
                with explain_disk_errors(self.folder):
                    self.file.write(piece.float().cpu().contiguous().numpy().data)

    def __call__(self, ids: Sequence[int]) -> Iterator[Tensor]:
        for offset, shape in self.offsets[tuple(ids)]:
            self.file.seek(offset)
            content = self.file.read(torch.Size(shape).numel() * LOGIT_BYTES)
            yield torch.frombuffer(bytearray(content), dtype=torch.float32).view(shape)


def logits_bytes(windows: Windows, vocab: int) -> int:
    return windows.tokens * vocab * LOGIT_BYTES

"""What a bucket of rows is drawn by, kept on the device: a step of the same rows uploads nothing.

`set` says what the next step draws by and copies what has changed through pinned memory; `launch` starts kernels
and nothing else, so that it can be captured in a graph. Between two calls of `set` there is one step, and with it
each position is one further. The rules are those of `sampler.py`. Knows nothing of sequences, graphs and the
engine.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.kernels.gpu.nucleus import LARGEST_VOCABULARY
from localllm.runtime.kernels.gpu.penalties import Biases, History
from localllm.runtime.kernels.gpu.sampling import Columns, Scratch, choose
from localllm.runtime.sampler import Row
from localllm.runtime.sent import fill

MOST_BIASES = 1024  # tokens that one row's logit_bias may name; longer lists are left to `sampler.sample`
ALIGNED = 4  # rows: columns begin at addresses that 16 divides, whatever the bucket
WORDS = {torch.int64: 2, torch.int32: 1, torch.float32: 1}  # of 4 bytes
TYPES = [torch.int64] * 2 + [torch.int32] * 5 + [torch.float32] * 6  # of the columns, in order


@dataclass(frozen=True)
class Kind:
    """Which kernels a step's draw takes: with the bucket, the key of its graph."""

    drawn: bool  # not all rows are greedy
    adjusted: bool  # a row has a bias or a penalty
    refused: str | None = None  # why `sampler.sample` has to do it


def refusal(params: SamplingParams, vocabulary: int) -> str | None:
    """Why `sampler.sample` has to draw by these parameters."""
    if vocabulary > LARGEST_VOCABULARY:
        return f"more than {LARGEST_VOCABULARY:,} tokens in the vocabulary"
    if len(params.logit_bias) > MOST_BIASES:
        return f"logit_bias of more than {MOST_BIASES:,} tokens"
    return None


def kind_of(rows: list[Row], vocabulary: int) -> Kind:
    params = [row.params for row in rows]
    refused = next((reason for p in params if (reason := refusal(p, vocabulary))), None)
    counted = [row.history for row in rows if row.params.counts_tokens]
    if len(set(counted)) < len(counted):
        refused = "several tokens of a sequence whose tokens are counted"
    if any(row.masks for row in rows):
        refused = "a grammar"
    if any(row.proposal for row in rows):
        refused = "drafts that were drawn"
    adjusted = any(p.logit_bias or p.counts_tokens for p in params)
    return Kind(any(p.temperature > 0 for p in params), adjusted, refused)


class Histories:
    """The tokens of sequences whose penalties are counted on the device, shared by all buckets.

    Takes 4 bytes for each row and each token of the context, and of the vocabulary.
    """

    def __init__(self, rows: int, context: int, vocabulary: int, device: torch.device):
        self.on_device = History(
            tokens=torch.zeros(rows, context, dtype=torch.int32, device=device),
            marks=torch.zeros(rows, vocabulary, dtype=torch.int32, device=device),
        )
        self.known: dict[int, tuple[ListLike[int], int]] = {}  # row: whose tokens it holds, and how many

    def follow(self, row: Row) -> None:
        """Have all tokens before the row's position on the device. Those that it drew itself are there; for others
        the host must know all of them."""
        assert row.history >= 0, "a row whose tokens are counted needs a row of the history"
        tokens, length = self.known.get(row.history, ((), 0))
        if tokens is not row.token_ids or length < row.position:
            assert len(row.token_ids) >= row.position, "neither the host nor the device has all tokens"
            known = torch.tensor(row.token_ids[: row.position], dtype=torch.int32)
            fill(self.on_device.tokens[row.history, : row.position], known)
        self.known[row.history] = (row.token_ids, row.position + 1)


class Draws:
    """The sampling of one bucket. `columns.position` may be read by other kernels."""

    def __init__(self, bucket: int, vocabulary: int, device: torch.device, histories: Histories):
        self.bucket, self.histories = bucket, histories
        self.packed = torch.zeros(words(bucket), dtype=torch.int32, device=device)
        self.columns = columns(self.packed, bucket)
        self.scratch = Scratch.of(bucket, vocabulary, device)
        self.biases = Biases(
            torch.full((bucket, MOST_BIASES), -1, dtype=torch.int32, device=device),
            torch.zeros(bucket, MOST_BIASES, dtype=torch.float32, device=device),
        )
        self.held: list[Row] = []
        self.biased = False

    def set(self, rows: list[Row]) -> None:
        """The next step draws these rows, the first of the bucket; the others are not read."""
        assert len(rows) <= self.bucket
        for row in rows:
            if row.params.counts_tokens:
                self.histories.follow(row)
        if len(rows) != len(self.held) or not all(map(continues, rows, self.held)):
            self.upload(rows)
        self.held = rows

    def upload(self, rows: list[Row]) -> None:
        packed = torch.zeros(self.packed.shape, dtype=torch.int32)
        values = list(map(values_of, rows))
        for i, column in enumerate(each(columns(packed, self.bucket))):
            column[: len(rows)] = torch.tensor([value[i] for value in values], dtype=column.dtype)
        fill(self.packed, packed)
        biased = any(row.params.logit_bias for row in rows)
        if biased or self.biased:
            token = torch.full((self.bucket, MOST_BIASES), -1, dtype=torch.int32)
            value = torch.zeros(self.bucket, MOST_BIASES)
            for i, row in enumerate(rows):
                bias = row.params.logit_bias
                token[i, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
                value[i, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
            fill(self.biases.token, token)
            fill(self.biases.value, value)
        self.biased = biased

    def launch(self, kind: Kind, logits: Tensor, choices: Tensor) -> None:
        """Starts the kernels of one step. kind: as `kind_of` the rows that were set, or one that does more.

        logits: [N, vocab] float32, N rows of the bucket, changed in place; choices: [N] int64, gets token ids,
        NO_NUMBER or NOTHING_LEFT. Rows that were not set are neither read nor written.
        """
        adjusted = (self.histories.on_device, self.biases) if kind.adjusted else None
        choose(logits, choices, self.columns, self.scratch, drawn=kind.drawn, adjusted=adjusted)


def continues(row: Row, before: Row) -> bool:
    """Is it the row of the step before, one position on?"""
    same = row.params is before.params and row.token_ids is before.token_ids
    return same and (row.seed, row.position, row.history) == (before.seed, before.position + 1, before.history)


def values_of(row: Row) -> tuple[float, ...]:
    """In the order of Columns."""
    p = row.params
    history, answer = -1, 0
    if p.counts_tokens:
        history, answer = row.history, len(row.token_ids) - row.output_counts.total()
    whole = (row.seed, row.position, 1, p.top_k, history, answer, p.repeat_last_n)
    filters = (p.temperature, p.top_p, p.min_p)
    return (*whole, *filters, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)


def words(bucket: int) -> int:
    return sum(WORDS[dtype] for dtype in TYPES) * room(bucket)


def room(bucket: int) -> int:
    return -(-bucket // ALIGNED) * ALIGNED


def columns(packed: Tensor, bucket: int) -> Columns:
    """Views of one packed tensor."""
    parts = packed.split([WORDS[dtype] * room(bucket) for dtype in TYPES])
    return Columns(*(part.view(dtype)[:bucket] for part, dtype in zip(parts, TYPES, strict=True)))


def each(of: Columns) -> list[Tensor]:
    return [getattr(of, field.name) for field in fields(of)]

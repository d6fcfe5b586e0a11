"""The draws of steps of any number of rows on a device that draws itself, and the same choices whether a step is
captured or not."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.host_to_device import upload_into
from localllm.runtime.kernels.gpu.nucleus import MAX_VOCABULARY
from localllm.runtime.kernels.gpu.penalties import LogitBiases, TokenHistory
from localllm.runtime.kernels.gpu.sampling import SamplingColumns, SamplingScratch, sample_tokens
from localllm.runtime.sampler import SamplingSpec, sample

# What a bucket of rows is drawn by, kept on the device: a step of the same rows uploads nothing.
#
# `set` says what the next step draws by and copies what has changed through pinned memory; `launch` starts
# kernels and nothing else, so that it can be captured in a graph. Between two calls of `set` there is one step,
# and with it each position is one further. The rules are those of `sampler.py`. Knows nothing of sequences,
# graphs and the engine.
MAX_BIASES = 1024  # tokens that one row's logit_bias may name; longer lists are left to `sampler.sample`
ROW_ALIGNMENT = 4  # rows: columns begin at addresses that 16 divides, whatever the bucket
DTYPE_WORDS = {torch.int64: 2, torch.int32: 1, torch.float32: 1}  # of 4 bytes
COLUMN_DTYPES = [torch.int64] * 2 + [torch.int32] * 5 + [torch.float32] * 6  # of the columns, in order


@dataclass(frozen=True)
class SamplingVariant:
    """Which kernels a step's draw takes: with the bucket, the key of its graph."""

    is_random: bool  # not all rows are greedy
    has_penalties: bool  # a row has a bias or a penalty
    unsupported_reason: str | None = None  # why `sampler.sample` has to do it


def unsupported_reason(params: SamplingParams, vocab_size: int) -> str | None:
    """Why `sampler.sample` has to draw by these parameters."""
    if vocab_size > MAX_VOCABULARY:
        return f"more than {MAX_VOCABULARY:,} tokens in the vocabulary"
    if len(params.logit_bias) > MAX_BIASES:
        return f"logit_bias of more than {MAX_BIASES:,} tokens"
    return None


def variant_of(specs: list[SamplingSpec], vocab_size: int) -> SamplingVariant:
    params = [row.params for row in specs]
    refused = next((reason for p in params if (reason := unsupported_reason(p, vocab_size))), None)
    counted = [row.history_slot for row in specs if row.params.uses_penalties]
    if len(set(counted)) < len(counted):
        refused = "several tokens of a sequence whose tokens are counted"
    if any(row.masks for row in specs):
        refused = "a grammar"
    if any(row.draft_and_probs for row in specs):
        refused = "drafts that were drawn"
    adjusted = any(p.logit_bias or p.uses_penalties for p in params)
    return SamplingVariant(any(p.temperature > 0 for p in params), adjusted, refused)


class TokenHistories:
    """The tokens of sequences whose penalties are counted on the device, shared by all buckets.

    Takes 4 bytes for each row and each token of the context, and of the vocabulary.
    """

    def __init__(self, slots: int, max_len: int, vocabulary: int, device: torch.device):
        self.on_device = TokenHistory(
            tokens=torch.zeros(slots, max_len, dtype=torch.int32, device=device),
            marks=torch.zeros(slots, vocabulary, dtype=torch.int32, device=device),
        )
        self.synced: dict[int, tuple[ListLike[int], int]] = {}  # row: whose tokens it holds, and how many

    def sync(self, spec: SamplingSpec) -> None:
        """Have all tokens before the row's position on the device. Those that it drew itself are there; for others
        the host must know all of them."""
        assert spec.history_slot >= 0, "a row whose tokens are counted needs a row of the history"
        tokens, length = self.synced.get(spec.history_slot, ((), 0))
        if tokens is not spec.token_ids or length < spec.position:
            assert len(spec.token_ids) >= spec.position, "neither the host nor the device has all tokens"
            known = torch.tensor(spec.token_ids[: spec.position], dtype=torch.int32)
            upload_into(self.on_device.tokens[spec.history_slot, : spec.position], known)
        self.synced[spec.history_slot] = (spec.token_ids, spec.position + 1)


class BucketSampler:
    """The sampling of one bucket. `columns.position` may be read by other kernels."""

    def __init__(self, bucket: int, vocabulary: int, device: torch.device, histories: TokenHistories):
        self.bucket, self.histories = bucket, histories
        self.packed = torch.zeros(packed_words(bucket), dtype=torch.int32, device=device)
        self.columns = unpack_columns(self.packed, bucket)
        self.scratch = SamplingScratch.allocate(bucket, vocabulary, device)
        self.biases = LogitBiases(
            torch.full((bucket, MAX_BIASES), -1, dtype=torch.int32, device=device),
            torch.zeros(bucket, MAX_BIASES, dtype=torch.float32, device=device),
        )
        self.last_specs: list[SamplingSpec] = []
        self.has_biases = False

    def prepare(self, specs: list[SamplingSpec]) -> None:
        """The next step draws these rows, the first of the bucket; the others are not read."""
        assert len(specs) <= self.bucket
        for row in specs:
            if row.params.uses_penalties:
                self.histories.sync(row)
        if len(specs) != len(self.last_specs) or not all(map(is_next_position, specs, self.last_specs)):
            self.upload(specs)
        self.last_specs = specs

    def upload(self, specs: list[SamplingSpec]) -> None:
        packed = torch.zeros(self.packed.shape, dtype=torch.int32)
        values = list(map(column_values, specs))
        for i, column in enumerate(column_tensors(unpack_columns(packed, self.bucket))):
            column[: len(specs)] = torch.tensor([value[i] for value in values], dtype=column.dtype)
        upload_into(self.packed, packed)
        biased = any(row.params.logit_bias for row in specs)
        if biased or self.has_biases:
            token = torch.full((self.bucket, MAX_BIASES), -1, dtype=torch.int32)
            value = torch.zeros(self.bucket, MAX_BIASES)
            for i, row in enumerate(specs):
                bias = row.params.logit_bias
                token[i, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
                value[i, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
            upload_into(self.biases.token, token)
            upload_into(self.biases.value, value)
        self.has_biases = biased

    def launch(self, variant: SamplingVariant, logits: Tensor, choices: Tensor) -> None:
        """Starts the kernels of one step. variant: as `kind_of` the rows that were set, or one that does more.

        logits: [N, vocab] float32, N rows of the bucket, changed in place; choices: [N] int64, gets token ids,
        NO_NUMBER or NOTHING_LEFT. Rows that were not set are neither read nor written.
        """
        adjusted = (self.histories.on_device, self.biases) if variant.has_penalties else None
        sample_tokens(
            logits, choices, self.columns, self.scratch, any_random=variant.is_random, penalties=adjusted
        )


def is_next_position(row: SamplingSpec, before: SamplingSpec) -> bool:
    """Is it the row of the step before, one position on?"""
    same = row.params is before.params and row.token_ids is before.token_ids
    return same and (row.seed, row.position, row.history_slot) == (
        before.seed,
        before.position + 1,
        before.history_slot,
    )


def column_values(row: SamplingSpec) -> tuple[float, ...]:
    """In the order of Columns."""
    p = row.params
    history, answer = -1, 0
    if p.uses_penalties:
        history, answer = row.history_slot, len(row.token_ids) - row.output_counts.total()
    whole = (row.seed, row.position, 1, p.top_k, history, answer, p.repeat_last_n)
    filters = (p.temperature, p.top_p, p.min_p)
    return (*whole, *filters, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)


def packed_words(bucket: int) -> int:
    return sum(DTYPE_WORDS[dtype] for dtype in COLUMN_DTYPES) * aligned_rows(bucket)


def aligned_rows(bucket: int) -> int:
    return -(-bucket // ROW_ALIGNMENT) * ROW_ALIGNMENT


def unpack_columns(packed: Tensor, bucket: int) -> SamplingColumns:
    """Views of one packed tensor."""
    parts = packed.split([DTYPE_WORDS[dtype] * aligned_rows(bucket) for dtype in COLUMN_DTYPES])
    return SamplingColumns(*(part.view(dtype)[:bucket] for part, dtype in zip(parts, COLUMN_DTYPES, strict=True)))


def column_tensors(of: SamplingColumns) -> list[Tensor]:
    return [getattr(of, field.name) for field in fields(of)]


class GpuSampler:
    def __init__(self, slots: int, max_len: int, vocabulary: int, device: torch.device):
        """slots: sequences whose tokens the device counts; max_len: most tokens of one"""
        self.vocab_size, self.device = vocabulary, device
        self.histories = TokenHistories(slots, max_len, vocabulary, device)
        self.buckets: dict[int, BucketSampler] = {}

    def supports(self, params: SamplingParams) -> bool:
        """Return whether the token counts for these parameters are kept on the device."""
        return unsupported_reason(params, self.vocab_size) is None

    def bucket_sampler(self, rows: int) -> BucketSampler:
        """Of steps with so many rows, or fewer."""
        bucket = 1 << (rows - 1).bit_length()
        if bucket not in self.buckets:
            self.buckets[bucket] = BucketSampler(bucket, self.vocab_size, self.device, self.histories)
        return self.buckets[bucket]

    def sample(self, logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
        """As `sampler.sample`."""
        kind = variant_of(specs, self.vocab_size)
        if not specs or kind.unsupported_reason:
            return sample(logits, specs)
        choices = torch.empty(len(specs), dtype=torch.int64, device=self.device)
        draws = self.bucket_sampler(len(specs))
        draws.prepare(specs)
        draws.launch(kind, logits, choices)
        return choices

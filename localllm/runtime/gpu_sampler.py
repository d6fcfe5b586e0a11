"""Sampling on a GPU for steps of any number of rows, with the same choices whether a step is captured or not."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.batch import upload_into
from localllm.runtime.kernels.gpu.nucleus import MAX_VOCABULARY
from localllm.runtime.kernels.gpu.penalties import LogitBiases, TokenHistory
from localllm.runtime.kernels.gpu.sampling import SamplingColumns, SamplingScratch, sample_tokens
from localllm.runtime.sampler import SamplingSpec, sample

MAX_BIASES = 1024  # biased and forbidden tokens of a row; more are left to `sampler.sample`
RESERVED_END_TOKENS = 64  # of the model, in addition to stop_ids
ROW_ALIGNMENT = 4  # rows: aligns columns to 16 bytes for every bucket
DTYPE_WORDS = {torch.int64: 2, torch.int32: 1, torch.float32: 1}  # in units of 4 bytes
COLUMN_DTYPES = [torch.int64] * 2 + [torch.int32] * 5 + [torch.float32] * 6  # of the columns, in order


@dataclass(frozen=True)
class SamplingVariant:
    """The properties of a step that select its sampling kernels; with the bucket, part of the key of its graph."""

    is_random: bool  # a row has a logit_bias or a penalty
    has_penalties: bool  # a row has a bias or a penalty
    unsupported_reason: str | None = None  # why `sampler.sample` has to sample instead


def unsupported_reason(params: SamplingParams, vocab_size: int) -> str | None:
    """Return why `sampler.sample` has to sample with these parameters, or None."""
    if vocab_size > MAX_VOCABULARY:
        return f"the vocabulary has more than {MAX_VOCABULARY:,} tokens"
    if len(params.logit_bias) > MAX_BIASES:
        return f"logit_bias names more than {MAX_BIASES:,} tokens"
    end_tokens = len(params.stop_ids) + RESERVED_END_TOKENS
    if params.min_tokens and len(params.logit_bias) + end_tokens > MAX_BIASES:
        return f"logit_bias and stop_ids name more than {MAX_BIASES - RESERVED_END_TOKENS:,} tokens"
    return None


def biases_of(spec: SamplingSpec, vocab_size: int) -> dict[int, float]:
    """Return the biases of a row: its logit_bias, and -inf for tokens that it may not sample at this position."""
    if not spec.forbidden_ids:
        return dict(spec.params.logit_bias)
    forbidden = {token: -math.inf for token in spec.forbidden_ids if token < vocab_size}
    return {**spec.params.logit_bias, **forbidden}


def variant_of(specs: list[SamplingSpec], vocab_size: int) -> SamplingVariant:
    params = [spec.params for spec in specs]
    unsupported = next((reason for p in params if (reason := unsupported_reason(p, vocab_size))), None)
    history_slots = [spec.history_slot for spec in specs if spec.params.uses_penalties]
    if len(set(history_slots)) < len(history_slots):
        unsupported = "several tokens of a sequence with penalties"
    if any(len(spec.forbidden_ids) > RESERVED_END_TOKENS + len(spec.params.stop_ids) for spec in specs):
        unsupported = f"the model has more than {RESERVED_END_TOKENS} end tokens"
    if any(spec.masks for spec in specs):
        unsupported = "a grammar limits the tokens"
    if any(spec.draft_and_probs for spec in specs):
        unsupported = "drafts were sampled from a draft model"
    has_penalties = any(s.forbidden_ids or s.params.logit_bias or s.params.uses_penalties for s in specs)
    return SamplingVariant(any(p.temperature > 0 for p in params), has_penalties, unsupported)


class TokenHistories:
    """Tokens of the sequences whose penalties are computed on the device, shared by all buckets.

    Takes 4 bytes per row for each token of the context and of the vocabulary.
    """

    def __init__(self, slots: int, max_len: int, vocabulary: int, device: torch.device):
        self.on_device = TokenHistory(
            tokens=torch.zeros(slots, max_len, dtype=torch.int32, device=device),
            marks=torch.zeros(slots, vocabulary, dtype=torch.int32, device=device),
        )
        # History slot: its token ids, and how many are on the device.
        self.synced: dict[int, tuple[ListLike[int], int]] = {}

    def sync(self, spec: SamplingSpec) -> None:
        """Upload all tokens before the row's position. Tokens that were sampled on the device are already there;
        all others must be known to the host.
        """
        assert spec.history_slot >= 0, "a row with penalties needs a history slot"
        tokens, length = self.synced.get(spec.history_slot, ((), 0))
        if tokens is not spec.token_ids or length < spec.position:
            assert len(spec.token_ids) >= spec.position, "neither the host nor the device has all tokens"
            host_tokens = torch.tensor(spec.token_ids[: spec.position], dtype=torch.int32)
            upload_into(self.on_device.tokens[spec.history_slot, : spec.position], host_tokens)
        self.synced[spec.history_slot] = (spec.token_ids, spec.position + 1)


class BucketSampler:
    """The sampling parameters of a bucket of rows and its buffers, on the device: a step of the same rows uploads
    nothing.

    `prepare` sets the parameters of the next step and uploads what has changed through pinned memory; `launch`
    only starts kernels, so that it can be captured in a graph. There is one step between two calls of `prepare`,
    and each row's position advances by one. The rules are those of `sampler.py`. `columns.position` may be read by
    other kernels.
    """

    def __init__(self, bucket: int, vocabulary: int, device: torch.device, histories: TokenHistories):
        self.bucket, self.vocab_size, self.histories = bucket, vocabulary, histories
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
        """Set the parameters of the next step for the first rows of the bucket; the others are not read."""
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
        biases = [biases_of(row, self.vocab_size) for row in specs]
        biased = any(biases)
        if biased or self.has_biases:
            token = torch.full((self.bucket, MAX_BIASES), -1, dtype=torch.int32)
            value = torch.zeros(self.bucket, MAX_BIASES)
            for i, bias in enumerate(biases):
                token[i, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
                value[i, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
            upload_into(self.biases.token, token)
            upload_into(self.biases.value, value)
        self.has_biases = biased

    def launch(self, variant: SamplingVariant, logits: Tensor, choices: Tensor) -> None:
        """Launch the sampling kernels of one step.

        variant: `variant_of` the prepared rows, or one with more features; logits: [N, vocab] float32 of N rows of
        the bucket, modified in place; choices: [N] int64, receives token ids, NOT_FINITE or ALL_FORBIDDEN. Rows
        that were not prepared are neither read nor written.
        """
        penalties = (self.histories.on_device, self.biases) if variant.has_penalties else None
        sample_tokens(
            logits, choices, self.columns, self.scratch, any_random=variant.is_random, penalties=penalties
        )


def is_next_position(row: SamplingSpec, before: SamplingSpec) -> bool:
    """Return whether `row` is the same row as in the step before, one position further."""
    same = row.params is before.params and row.token_ids is before.token_ids
    same = same and row.forbidden_ids == before.forbidden_ids
    return same and (row.seed, row.position, row.history_slot) == (
        before.seed,
        before.position + 1,
        before.history_slot,
    )


def column_values(spec: SamplingSpec) -> tuple[float, ...]:
    """Return a row's values in the order of SamplingColumns."""
    params = spec.params
    history, answer = -1, 0
    if params.uses_penalties:
        history, answer = spec.history_slot, len(spec.token_ids) - spec.output_counts.total()
    integers = (spec.seed, spec.position, 1, params.top_k, history, answer, params.repeat_last_n)
    filters = (params.temperature, params.top_p, params.min_p)
    return (*integers, *filters, params.repetition_penalty, params.presence_penalty, params.frequency_penalty)


def packed_words(bucket: int) -> int:
    return sum(DTYPE_WORDS[dtype] for dtype in COLUMN_DTYPES) * aligned_rows(bucket)


def aligned_rows(bucket: int) -> int:
    return -(-bucket // ROW_ALIGNMENT) * ROW_ALIGNMENT


def unpack_columns(packed: Tensor, bucket: int) -> SamplingColumns:
    """Return views of one packed tensor as columns."""
    parts = packed.split([DTYPE_WORDS[dtype] * aligned_rows(bucket) for dtype in COLUMN_DTYPES])
    return SamplingColumns(*(part.view(dtype)[:bucket] for part, dtype in zip(parts, COLUMN_DTYPES, strict=True)))


def column_tensors(of: SamplingColumns) -> list[Tensor]:
    return [getattr(of, field.name) for field in fields(of)]


class GpuSampler:
    def __init__(self, slots: int, max_len: int, vocabulary: int, device: torch.device):
        """slots: sequences with penalties computed on the device; max_len: maximum tokens per sequence"""
        self.vocab_size, self.device = vocabulary, device
        self.histories = TokenHistories(slots, max_len, vocabulary, device)
        self.buckets: dict[int, BucketSampler] = {}

    def supports(self, params: SamplingParams, end_tokens: int) -> bool:
        """Return whether the token counts for these parameters are kept on the device.

        end_tokens: tokens that end the answer, which min_tokens forbids
        """
        if params.min_tokens and end_tokens > RESERVED_END_TOKENS + len(params.stop_ids):
            return False
        return unsupported_reason(params, self.vocab_size) is None

    def bucket_sampler(self, rows: int) -> BucketSampler:
        """Return the sampler of the smallest bucket for this many rows."""
        bucket = 1 << (rows - 1).bit_length()
        if bucket not in self.buckets:
            self.buckets[bucket] = BucketSampler(bucket, self.vocab_size, self.device, self.histories)
        return self.buckets[bucket]

    def warm_up(self) -> None:
        """Launch the kernels of each variant on a row whose result is not read, so that they are compiled."""
        for temperature, penalty in itertools.product((0.0, 1.0), (0.0, 0.5)):
            params = SamplingParams(temperature=temperature, presence_penalty=penalty)
            spec = SamplingSpec(params, 0, 1, [0], Counter(), history_slot=0)
            self.sample(torch.zeros(1, self.vocab_size, device=self.device), [spec])
        self.histories.synced.clear()

    def sample(self, logits: Tensor, specs: list[SamplingSpec]) -> Tensor:
        """Sample like `sampler.sample`, on the device if it supports the rows."""
        variant = variant_of(specs, self.vocab_size)
        if not specs or variant.unsupported_reason:
            return sample(logits, specs)
        choices = torch.empty(len(specs), dtype=torch.int64, device=self.device)
        bucket_sampler = self.bucket_sampler(len(specs))
        bucket_sampler.prepare(specs)
        bucket_sampler.launch(variant, logits, choices)
        return choices

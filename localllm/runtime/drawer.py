"""The draws of steps of any number of rows on a device that draws itself, and the same choices whether a step is
captured or not."""

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.gpu_sampler import BucketSampler, TokenHistories, unsupported_reason, variant_of
from localllm.runtime.sampler import SamplingSpec, sample


class GpuSampler:
    def __init__(self, slots: int, max_len: int, vocabulary: int, device: torch.device):
        """slots: sequences whose tokens the device counts; max_len: most tokens of one"""
        self.vocab_size, self.device = vocabulary, device
        self.histories = TokenHistories(slots, max_len, vocabulary, device)
        self.buckets: dict[int, BucketSampler] = {}

    def supports(self, params: SamplingParams) -> bool:
        """Does the device itself count the tokens that are drawn by these parameters?"""
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

"""The draws of steps of any number of rows on a device that draws itself, and the same choices whether a step is
captured or not."""

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.draws import Draws, Histories, kind_of, refusal
from localllm.runtime.sampler import Row, sample


class Drawer:
    def __init__(self, places: int, context: int, vocabulary: int, device: torch.device):
        """places: sequences whose tokens the device counts; context: most tokens of one"""
        self.vocabulary, self.device = vocabulary, device
        self.histories = Histories(places, context, vocabulary, device)
        self.buckets: dict[int, Draws] = {}

    def counts(self, params: SamplingParams) -> bool:
        """Does the device itself count the tokens that are drawn by these parameters?"""
        return refusal(params, self.vocabulary) is None

    def of(self, rows: int) -> Draws:
        """Of steps with so many rows, or fewer."""
        bucket = 1 << (rows - 1).bit_length()
        if bucket not in self.buckets:
            self.buckets[bucket] = Draws(bucket, self.vocabulary, self.device, self.histories)
        return self.buckets[bucket]

    def draw(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """As `sampler.sample`."""
        kind = kind_of(rows, self.vocabulary)
        if not rows or kind.refused:
            return sample(logits, rows)
        choices = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        draws = self.of(len(rows))
        draws.set(rows)
        draws.launch(kind, logits, choices)
        return choices

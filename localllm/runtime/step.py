"""One step as the host knows it, and what it brings: the engine says the one, a runner does it and hands back the
other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, SequenceState
from localllm.runtime.sampler import SamplingSpec


class Readback:
    """Numbers that the device will have computed: on their way to the host since they were asked for, so that
    reading them waits for their own step and not for what was launched after it."""

    def __init__(self, values: Tensor):
        """values: [N] int64"""
        self.values, self.copied = values, None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def wait(self) -> Tensor:
        """[N] int64 on the host"""
        if self.copied:
            self.copied.synchronize()
        return self.values


@dataclass(frozen=True)
class Step:
    """`token_ids[i]` are the last tokens of `states[i]`, whose room has been made by `extend`."""

    states: list[SequenceState]
    token_ids: list[list[int]]
    logit_index: list[int]  # tokens of T whose logits are wanted, those first that are drawn from
    sampling_specs: list[SamplingSpec]
    token_slots: list[int]  # where the last token drawn of each sequence is kept on the device
    unread_tokens: list[tuple[int, int]]  # (token of T, row): tokens that are kept there, and known nowhere else
    keep_logits: bool = False  # those that are drawn from are wanted as the model gave them
    copies: CacheCopies = NO_COPIES

    @property
    def token_counts(self) -> list[int]:
        return [len(tokens) for tokens in self.token_ids]

    @property
    def last_spec_indices(self) -> list[int]:
        """Which of the draws is the last of each sequence."""
        return [i - 1 for i, row in enumerate(self.sampling_specs) if i and row.draft_index == 0] + [
            len(self.sampling_specs) - 1
        ]


@dataclass(frozen=True)
class StepOutput:
    sampled_ids: Readback  # [len(draws)]
    logits: Tensor | None  # [len(draws), vocab] float32 as the model gave them, if the step keeps them
    prompt_logits: Tensor  # [N - len(draws), vocab] float32, of the rest of `logit_index`

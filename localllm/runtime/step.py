"""The input of one step, which the engine builds, and its output, which a runner returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, SequenceState
from localllm.runtime.sampler import SamplingSpec


class Readback:
    """Values that are copied from the device to the host in the background.

    `wait` waits for the step that computed them, not for what was launched after it.
    """

    def __init__(self, values: Tensor):
        """values: [N] int64"""
        self.values, self.copied = values, None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """[N] int64 on the host"""
        if self.copied:
            self.copied.synchronize()
        return self.values


class StepShape(NamedTuple):
    """The amount of work of a step, on which its duration depends.

    A sequence decodes if it brings one token and its drafts; otherwise it brings a part of its prompt.
    """

    sequences: int  # that decode
    tokens: int  # of these, drafts included
    context: int  # cached tokens of these after the step, summed
    prompts: int  # sequences that bring a part of their prompts
    prompt_tokens: int
    prompt_context: int  # cached tokens of these after the step, summed
    pairs: int  # of a prompt token and a token that it attends to

    @property
    def kind(self) -> str:
        """`decode`, `prefill`, or `mixed` for a step that does both."""
        if not self.prompts:
            return "decode"
        return "mixed" if self.sequences else "prefill"


@dataclass(frozen=True)
class Step:
    """`token_ids[i]` are the last tokens of `states[i]`, which already has slots for them (`extend`)."""

    states: list[SequenceState]
    token_ids: list[list[int]]
    logit_index: list[int]  # tokens of T whose logits are computed; those that are sampled from come first
    sampling_specs: list[SamplingSpec]
    token_slots: list[int]  # where the last sampled token of each sequence is stored on the device
    unread_tokens: list[tuple[int, int]]  # (token of T, token slot): tokens known to the device alone
    keep_logits: bool = False  # return the unmodified logits of the sampled positions
    copies: CacheCopies = NO_COPIES

    @property
    def token_counts(self) -> list[int]:
        return [len(tokens) for tokens in self.token_ids]

    @property
    def last_spec_indices(self) -> list[int]:
        """Index of the last sampling spec of each sequence."""
        return [i - 1 for i, spec in enumerate(self.sampling_specs) if i and spec.draft_index == 0] + [
            len(self.sampling_specs) - 1
        ]


@dataclass(frozen=True)
class StepOutput:
    sampled_ids: Readback  # [len(sampling_specs)]
    logits: Tensor | None  # [len(sampling_specs), vocab] float32, unmodified; None unless the step keeps them
    prompt_logits: Tensor  # [N - len(sampling_specs), vocab] float32, of the rest of `logit_index`

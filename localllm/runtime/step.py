"""The input of one step, which the engine builds, and its output, which a runner returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, SequenceState
from localllm.runtime.sampler import SamplingSpec


class Readback:
    """Results of a step that are copied from the device to the host in the background.

    `wait` waits for the step that computed them, not for what was launched after it.
    """

    def __init__(self, sampled_ids: Tensor, logprobs: Tensor | None = None, prompt_logprobs: Tensor | None = None):
        """sampled_ids: [N] int64; the others: `logprob_table` of sampled and of prompt tokens, if requested"""
        results = (sampled_ids, logprobs, prompt_logprobs)
        self.copied = torch.cuda.Event() if sampled_ids.is_cuda else None
        self.results = tuple(map(copy_to_host, results)) if self.copied else results
        if self.copied:
            self.copied.record(torch.cuda.current_stream(sampled_ids.device))

    def wait(self) -> tuple[Tensor | None, ...]:
        """Return the results on the host."""
        if self.copied:
            self.copied.synchronize()
        return self.results


def copy_to_host(values: Tensor | None) -> Tensor | None:
    """Start copying to pinned memory."""
    if values is None:
        return None
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class StepShape(NamedTuple):
    """The amount of work of a step, on which its duration depends.

    A sequence decodes if its new tokens are one token and its drafts; otherwise they are a part of its prompt.
    """

    sequences: int  # that decode
    tokens: int  # of these, drafts included
    context: int  # cached tokens of these after the step, summed
    prompts: int  # sequences whose new tokens are a part of their prompts
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
    logprobs: int | None = None  # likeliest tokens of which sampled positions report log probabilities, if they do
    prompt_next_ids: list[int] = field(default_factory=list)  # tokens behind the other positions of `logit_index`
    prompt_logprobs: int = 0  # likeliest tokens of which those positions report log probabilities
    copies: CacheCopies = NO_COPIES

    @property
    def uses_logits(self) -> bool:
        """Whether the logits of sampled positions are used besides for sampling, which modifies them."""
        return self.keep_logits or self.logprobs is not None

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
    results: Readback
    logits: Tensor | None  # [len(sampling_specs), vocab] float32, unmodified; None unless the step keeps them


@dataclass
class PendingOutput:
    """The output of a step that other stages compute: waited for, and sampled from, when it is read."""

    finish: Callable[[], StepOutput]

    @cached_property
    def finished(self) -> StepOutput:
        return self.finish()

    @property
    def results(self) -> Readback:
        return self.finished.results

    @property
    def logits(self) -> Tensor | None:
        return self.finished.logits

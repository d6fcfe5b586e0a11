"""One step as the host knows it, and what it brings: the engine says the one, a runner does it and hands back the
other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.runtime.sampler import Row
from localllm.runtime.state import NO_COPIES, Copies, SequenceState


class Readback:
    """Numbers that the device will have computed: on their way to the host since they were asked for, so that
    reading them waits for their own step and not for what was launched after it."""

    def __init__(self, numbers: Tensor):
        """numbers: [N] int64"""
        self.numbers, self.arrived = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def wait(self) -> Tensor:
        """[N] int64 on the host"""
        if self.arrived:
            self.arrived.synchronize()
        return self.numbers


@dataclass(frozen=True)
class Step:
    """`token_ids[i]` are the last tokens of `states[i]`, whose room has been made by `extend`."""

    states: list[SequenceState]
    token_ids: list[list[int]]
    logit_index: list[int]  # tokens of T whose logits are wanted, those first that are drawn from
    draws: list[Row]
    rows: list[int]  # where the last token drawn of each sequence is kept on the device
    unread: list[tuple[int, int]]  # (token of T, row): tokens that are kept there, and known nowhere else
    keeps_logits: bool = False  # those that are drawn from are wanted as the model gave them
    copies: Copies = NO_COPIES

    @property
    def counts(self) -> list[int]:
        return [len(tokens) for tokens in self.token_ids]

    @property
    def lasts(self) -> list[int]:
        """Which of the draws is the last of each sequence."""
        return [i - 1 for i, row in enumerate(self.draws) if i and row.place == 0] + [len(self.draws) - 1]


@dataclass(frozen=True)
class Drawn:
    choices: Readback  # [len(draws)]
    logits: Tensor | None  # [len(draws), vocab] float32 as the model gave them, if the step keeps them
    others: Tensor  # [N - len(draws), vocab] float32, of the rest of `logit_index`

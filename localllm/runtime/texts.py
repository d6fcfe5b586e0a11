"""Whole texts as flat tensors, one after another, those of one length side by side: nothing is padded, so that no
text can tell what it was computed with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.host_to_device import upload_values


@dataclass(frozen=True)
class LengthGroup:
    """Texts of one length."""

    start: int  # of its tokens in T
    text_count: int
    length: int  # tokens of each

    @property
    def token_slice(self) -> slice:
        return slice(self.start, self.start + self.text_count * self.length)


@dataclass(frozen=True)
class EncoderBatch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    groups: tuple[LengthGroup, ...]
    # Made once, for all layers:
    rope_angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # cos and sin, [T, 1, dim / 2]

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[Sequence[int]], device: torch.device) -> "EncoderBatch":
        """Of texts that are sorted by their length."""
        groups: list[LengthGroup] = []
        begin = 0
        for length, same in groupby(map(len, token_ids)):
            groups.append(LengthGroup(begin, len(list(same)), length))
            begin = groups[-1].token_slice.stop
        return cls(
            token_ids=upload_values([token for ids in token_ids for token in ids], torch.int64, device),
            positions=upload_values(
                [place for ids in token_ids for place in range(len(ids))], torch.int64, device
            ),
            groups=tuple(groups),
        )

    def split_by_length(self, x: Tensor) -> Iterator[Tensor]:
        """x: [T, ...] -> of each group [texts, length, ...]"""
        for group in self.groups:
            yield x[group.token_slice].unflatten(0, (group.text_count, group.length))

"""Whole texts as flat tensors, one after another, those of one length side by side: nothing is padded, so that no
text can tell what it was computed with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.sent import sent


@dataclass(frozen=True)
class Group:
    """Texts of one length."""

    begin: int  # of its tokens in T
    texts: int
    length: int  # tokens of each

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.texts * self.length)


@dataclass(frozen=True)
class Texts:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    groups: tuple[Group, ...]
    # Made once, for all layers:
    angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos and sin, [T, 1, dim / 2]

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]], device: torch.device) -> "Texts":
        """Of texts that are sorted by their length."""
        groups, begin = [], 0
        for length, same in groupby(map(len, token_ids)):
            groups.append(Group(begin, len(list(same)), length))
            begin = groups[-1].tokens.stop
        return cls(
            token_ids=sent([token for ids in token_ids for token in ids], torch.int64, device),
            positions=sent([place for ids in token_ids for place in range(len(ids))], torch.int64, device),
            groups=tuple(groups),
        )

    def parted(self, x: Tensor) -> Iterator[Tensor]:
        """x: [T, ...] -> of each group [texts, length, ...]"""
        for group in self.groups:
            yield x[group.tokens].unflatten(0, (group.texts, group.length))

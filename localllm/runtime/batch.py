"""One step's work as flat tensors: prefill, chunk and decode differ only in how many tokens a sequence brings."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.state import SequenceState


@dataclass(frozen=True)
class Span:
    """The host's view of one sequence in a step, for paths that go sequence by sequence."""

    start: int  # of its tokens in T
    count: int  # tokens that it brings
    context_len: int  # tokens in the cache once this step has run
    first_slot: int | None  # where its context begins if its blocks are neighbours; None: gather them


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B + 1] int32, where each sequence's tokens begin in T
    context_len: Tensor  # [B] int32, tokens in the cache once this step has run
    block_table: Tensor  # [B, max_blocks] int32
    slot: Tensor  # [T] int64, where each token's keys and values go
    logit_index: Tensor  # [N] int64, the tokens of T whose logits are wanted
    spans: tuple[Span, ...]
    block_size: int
    copies: tuple[tuple[int, int], ...] = ()  # blocks to copy before anything is written
    # Made once a step, for all layers:
    angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos and sin, [T, 1, dim / 2]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        states: list[SequenceState],
        token_ids: list[list[int]],
        logit_index: list[int],
        device: torch.device,
        copies: tuple[tuple[int, int], ...] = (),
    ) -> "Batch":
        """`token_ids[i]` are the last tokens of `states[i]`, whose room has been made by `extend`."""
        size = states[0].pool.block_size
        table = torch.zeros(len(states), max(len(s.table) for s in states), dtype=torch.int32)
        positions, slots, spans, starts = [], [], [], [0]
        for i, (state, tokens) in enumerate(zip(states, token_ids, strict=True)):
            table[i, : len(state.table)] = row = torch.tensor(state.table, dtype=torch.int32)
            position = torch.arange(state.length - len(tokens), state.length)
            positions.append(position)
            slots.append(row[position // size] * size + position % size)
            neighbours = bool((row[1:] - row[:-1] == 1).all())
            first = state.table[0] * size if neighbours else None
            spans.append(Span(starts[-1], len(tokens), state.length, first))
            starts.append(starts[-1] + len(tokens))
        return cls(
            token_ids=torch.tensor([t for tokens in token_ids for t in tokens], device=device),
            positions=torch.cat(positions).to(device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_len=torch.tensor([s.length for s in states], dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot=torch.cat(slots).to(device),
            logit_index=torch.tensor(logit_index, dtype=torch.int64, device=device),
            spans=tuple(spans),
            block_size=size,
            copies=copies,
        )

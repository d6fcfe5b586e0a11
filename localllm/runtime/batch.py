"""One step's work as flat tensors: prefill, chunk and decode differ only in how many tokens a sequence brings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.sent import sent
from localllm.runtime.state import NO_COPIES, Copies, SequenceState


@dataclass(frozen=True)
class Span:
    """The host's view of one sequence in a step, for paths that go sequence by sequence."""

    start: int  # of its tokens in T
    count: int  # tokens that it brings
    context_len: int  # tokens in the cache once this step has run
    first_slot: int | None  # where its context begins if its blocks are neighbours; None: gather them
    row: int = -1  # of its recurrent state
    saves: tuple[tuple[int, int], ...] = ()  # (tokens of the span, row): what to save inside it, and where

    def pieces(self) -> Iterator[tuple[slice, int]]:
        """Its tokens in T in parts, and the row that the recurrent state goes to after each; ends at its own."""
        begin = 0
        for end, row in (*self.saves, (self.count, self.row)):
            yield slice(self.start + begin, self.start + end), row
            begin = end


@dataclass(frozen=True)
class Singles:
    """The sequences that bring one token, so that recurrent layers can step them together."""

    tokens: Tensor  # [S] int64, where they stand in T
    rows: Tensor  # [S] int64
    first_row: int | None  # where their rows are neighbours; None: gather them

    def read(self, state: Tensor) -> Tensor:
        """Their rows of `state`, [S, ...]: a view where they are neighbours, else a copy."""
        if self.first_row is None:
            return state.index_select(0, self.rows)
        return state[self.first_row : self.first_row + len(self.rows)]

    def write(self, state: Tensor, values: Tensor) -> None:
        """What was read and has been changed in place goes back."""
        if self.first_row is None:
            state.index_copy_(0, self.rows, values)


class CannotCapture(Exception):
    """A kernel needs the host's view of a step that is being captured for many."""


NOT_HERE = "one of its kernels goes sequence by sequence"


class OnTheDevice(tuple[Span, ...]):
    """The spans of a step whose lengths only the device knows."""

    def __len__(self) -> int:
        raise CannotCapture(NOT_HERE)

    def __iter__(self) -> Iterator[Span]:
        raise CannotCapture(NOT_HERE)

    def __getitem__(self, index: object) -> Any:
        raise CannotCapture(NOT_HERE)


ON_THE_DEVICE = OnTheDevice()


@dataclass(frozen=True)
class Pieces:
    """The parts of spans after which a recurrent state goes to a row, for kernels: those of sequence i are
    first[i] .. first[i + 1] - 1, and piece p ends before the token end[p + 1]."""

    first: Tensor  # [B + 1] int32
    end: Tensor  # [P + 1] int32
    row: Tensor  # [P] int32


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B + 1] int32, where each sequence's tokens begin in T
    context_len: Tensor  # [B] int32, tokens in the cache once this step has run
    block_table: Tensor  # [B, max_blocks] int32
    slot: Tensor  # [T] int64, where each token's keys and values go
    logit_index: Tensor | None  # [N] int64, the tokens of T whose logits are wanted; None: all
    block_size: int
    longest: int  # most tokens that a sequence brings
    uniform: int | None  # so many does each bring; None: they differ
    rows: Tensor | None = None  # [B] int32, of recurrent states
    spans: tuple[Span, ...] = ON_THE_DEVICE
    copies: Copies = NO_COPIES
    singles: Singles | None = None  # for recurrent layers
    saves: tuple[tuple[int, int], ...] = ()  # rows to copy when the step has run: saves at the end of a span
    # Made once a step, for all layers:
    angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos and sin, [T, 1, dim / 2]
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    tasks: dict[int, Tensor] = field(default_factory=dict)  # of attention on a CPU

    @cached_property
    def pieces(self) -> Pieces | None:
        """None where each span is one piece: no state is saved inside one."""
        if self.spans is ON_THE_DEVICE or not any(span.saves for span in self.spans):
            return None
        first, end, row = [0], [0], []
        for span in self.spans:
            for piece, place in span.pieces():
                end.append(piece.stop)
                row.append(place)
            first.append(len(row))
        return Pieces(*(sent(numbers, torch.int32, self.token_ids.device) for numbers in (first, end, row)))

    @classmethod
    def of(
        cls,
        states: list[SequenceState],
        token_ids: list[list[int]],
        logit_index: list[int],
        device: torch.device,
        copies: Copies = NO_COPIES,
    ) -> "Batch":
        """`token_ids[i]` are the last tokens of `states[i]`, whose room has been made by `extend`."""
        size = states[0].pool.block_size
        longest = max(len(s.table) for s in states)
        tables, positions, slots, spans, starts, saves = [], list[int](), list[int](), [], [0], []
        for state, tokens in zip(states, token_ids, strict=True):
            blocks, places = state.table, range(state.length - len(tokens), state.length)
            tables.append(blocks + [0] * (longest - len(blocks)))
            positions += places
            slots += [blocks[place // size] * size + place % size for place in places]
            neighbours = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            spans.append(span_of(state, starts[-1], len(tokens), blocks[0] * size if neighbours else None))
            saves += state.saves_at_end
            starts.append(starts[-1] + len(tokens))
        counts = [span.count for span in spans]
        return cls(
            token_ids=sent([t for tokens in token_ids for t in tokens], torch.int64, device),
            positions=sent(positions, torch.int64, device),
            query_start=sent(starts, torch.int32, device),
            context_len=sent([s.length for s in states], torch.int32, device),
            block_table=sent(tables, torch.int32, device),
            slot=sent(slots, torch.int64, device),
            logit_index=sent(logit_index, torch.int64, device),
            block_size=size,
            longest=max(counts),
            uniform=counts[0] if min(counts) == max(counts) else None,
            rows=row_tensor(states, device),
            spans=tuple(spans),
            copies=copies,
            singles=singles(spans, device) if states[0].pool.recurrent else None,
            saves=tuple(saves),
        )


def row_tensor(states: list[SequenceState], device: torch.device) -> Tensor | None:
    rows = [state.row for state in states if state.row is not None]
    return sent(rows, torch.int32, device) if rows else None


def span_of(state: SequenceState, start: int, count: int, first_slot: int | None) -> Span:
    if state.row is None:
        return Span(start, count, state.length, first_slot)
    before = state.length - count
    inside = [(s.length - before, s.row) for s in state.saves if before < s.length < state.length]
    return Span(start, count, state.length, first_slot, state.row, tuple(sorted(inside)))


def singles(spans: list[Span], device: torch.device) -> Singles | None:
    alone = [span for span in spans if span.count == 1]
    if not alone:
        return None
    rows = [span.row for span in alone]
    return Singles(
        tokens=sent([span.start for span in alone], torch.int64, device),
        rows=sent(rows, torch.int64, device),
        first_row=rows[0] if rows == list(range(rows[0], rows[0] + len(rows))) else None,
    )

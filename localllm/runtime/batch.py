"""One step's work as flat tensors: prefill, chunk and decode differ only in how many tokens a sequence brings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.host_to_device import upload_values
from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, SequenceState


# Whole texts as flat tensors, one after another, those of one length side by side: nothing is padded, so that no
# text can tell what it was computed with.
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


@dataclass(frozen=True)
class SequenceSpan:
    """The host's view of one sequence in a step, for paths that go sequence by sequence."""

    start: int  # of its tokens in T
    count: int  # tokens that it brings
    context_len: int  # tokens in the cache once this step has run
    first_slot: int | None  # where its context begins if its blocks are neighbours; None: gather them
    state_slot: int = -1  # of its recurrent state
    state_saves: tuple[tuple[int, int], ...] = ()  # (tokens of the span, row): what to save inside it, and where

    def split_at_saves(self) -> Iterator[tuple[slice, int]]:
        """Its tokens in T in parts, and the row that the recurrent state goes to after each; ends at its own."""
        begin = 0
        for end, row in (*self.state_saves, (self.count, self.state_slot)):
            yield slice(self.start + begin, self.start + end), row
            begin = end


@dataclass(frozen=True)
class SingleTokenSpans:
    """The sequences that bring one token, so that recurrent layers can step them together."""

    token_index: Tensor  # [S] int64, where they stand in T
    state_slots: Tensor  # [S] int64
    first_state_slot: int | None  # where their rows are neighbours; None: gather them

    def gather(self, state: Tensor) -> Tensor:
        """Their rows of `state`, [S, ...]: a view where they are neighbours, else a copy."""
        if self.first_state_slot is None:
            return state.index_select(0, self.state_slots)
        return state[self.first_state_slot : self.first_state_slot + len(self.state_slots)]

    def scatter(self, state: Tensor, values: Tensor) -> None:
        """What was read and has been changed in place goes back."""
        if self.first_state_slot is None:
            state.index_copy_(0, self.state_slots, values)


class CannotCapture(Exception):
    """A kernel needs the host's view of a step that is being captured for many."""


NO_HOST_VIEW = "one of its kernels goes sequence by sequence"


class DeviceOnlySpans(tuple[SequenceSpan, ...]):
    """The spans of a step whose lengths only the device knows."""

    def __len__(self) -> int:
        raise CannotCapture(NO_HOST_VIEW)

    def __iter__(self) -> Iterator[SequenceSpan]:
        raise CannotCapture(NO_HOST_VIEW)

    def __getitem__(self, index: object) -> Any:
        raise CannotCapture(NO_HOST_VIEW)


DEVICE_ONLY = DeviceOnlySpans()


@dataclass(frozen=True)
class StateSegments:
    """The parts of spans after which a recurrent state goes to a row, for kernels: those of sequence i are
    first[i] .. first[i + 1] - 1, and piece p ends before the token end[p + 1]."""

    first: Tensor  # [B + 1] int32
    end: Tensor  # [P + 1] int32
    state_slot: Tensor  # [P] int32


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B + 1] int32, where each sequence's tokens begin in T
    context_len: Tensor  # [B] int32, tokens in the cache once this step has run
    block_table: Tensor  # [B, max_blocks] int32
    slot_mapping: Tensor  # [T] int64, where each token's keys and values go
    logit_index: Tensor | None  # [N] int64, the tokens of T whose logits are wanted; None: all
    block_size: int
    max_query_len: int  # most tokens that a sequence brings
    uniform_query_len: int | None  # so many does each bring; None: they differ
    state_slots: Tensor | None = None  # [B] int32, of recurrent states
    spans: tuple[SequenceSpan, ...] = DEVICE_ONLY
    copies: CacheCopies = NO_COPIES
    single_token_spans: SingleTokenSpans | None = None  # for recurrent layers
    state_saves: tuple[tuple[int, int], ...] = ()  # rows to copy when the step has run: saves at the end of a span
    # Made once a step, for all layers:
    rope_angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # cos and sin, [T, 1, dim / 2]
    attention_masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    attention_tasks: dict[int, Tensor] = field(default_factory=dict)  # of attention on a CPU

    @cached_property
    def state_segments(self) -> StateSegments | None:
        """None where each span is one piece: no state is saved inside one."""
        if self.spans is DEVICE_ONLY or not any(span.state_saves for span in self.spans):
            return None
        first, end, row = [0], [0], []
        for span in self.spans:
            for piece, place in span.split_at_saves():
                end.append(piece.stop)
                row.append(place)
            first.append(len(row))
        return StateSegments(
            *(upload_values(numbers, torch.int32, self.token_ids.device) for numbers in (first, end, row))
        )

    @classmethod
    def from_states(
        cls,
        states: list[SequenceState],
        token_ids: list[list[int]],
        logit_index: list[int],
        device: torch.device,
        copies: CacheCopies = NO_COPIES,
    ) -> "Batch":
        """`token_ids[i]` are the last tokens of `states[i]`, whose room has been made by `extend`."""
        size = states[0].pool.block_size
        longest = max(len(s.block_table) for s in states)
        tables, positions, slots, spans, starts, saves = [], list[int](), list[int](), [], [0], []
        for state, tokens in zip(states, token_ids, strict=True):
            blocks, places = state.block_table, range(state.length - len(tokens), state.length)
            tables.append(blocks + [0] * (longest - len(blocks)))
            positions += places
            slots += [blocks[place // size] * size + place % size for place in places]
            neighbours = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            spans.append(make_span(state, starts[-1], len(tokens), blocks[0] * size if neighbours else None))
            saves += state.end_of_step_copies
            starts.append(starts[-1] + len(tokens))
        counts = [span.count for span in spans]
        return cls(
            token_ids=upload_values([t for tokens in token_ids for t in tokens], torch.int64, device),
            positions=upload_values(positions, torch.int64, device),
            query_start=upload_values(starts, torch.int32, device),
            context_len=upload_values([s.length for s in states], torch.int32, device),
            block_table=upload_values(tables, torch.int32, device),
            slot_mapping=upload_values(slots, torch.int64, device),
            logit_index=upload_values(logit_index, torch.int64, device),
            block_size=size,
            max_query_len=max(counts),
            uniform_query_len=counts[0] if min(counts) == max(counts) else None,
            state_slots=state_slot_tensor(states, device),
            spans=tuple(spans),
            copies=copies,
            single_token_spans=make_single_token_spans(spans, device) if states[0].pool.recurrent else None,
            state_saves=tuple(saves),
        )


def state_slot_tensor(states: list[SequenceState], device: torch.device) -> Tensor | None:
    rows = [state.state_slot for state in states if state.state_slot is not None]
    return upload_values(rows, torch.int32, device) if rows else None


def make_span(state: SequenceState, start: int, count: int, first_slot: int | None) -> SequenceSpan:
    if state.state_slot is None:
        return SequenceSpan(start, count, state.length, first_slot)
    before = state.length - count
    inside = [(s.length - before, s.slot) for s in state.state_saves if before < s.length < state.length]
    return SequenceSpan(start, count, state.length, first_slot, state.state_slot, tuple(sorted(inside)))


def make_single_token_spans(spans: list[SequenceSpan], device: torch.device) -> SingleTokenSpans | None:
    alone = [span for span in spans if span.count == 1]
    if not alone:
        return None
    rows = [span.state_slot for span in alone]
    return SingleTokenSpans(
        token_index=upload_values([span.start for span in alone], torch.int64, device),
        state_slots=upload_values(rows, torch.int64, device),
        first_state_slot=rows[0] if rows == list(range(rows[0], rows[0] + len(rows))) else None,
    )

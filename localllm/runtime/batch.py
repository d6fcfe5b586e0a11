"""One step's work as flat tensors. Prefill, chunk and decode differ only in the number of new tokens per
sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.arch.config import RopeConfig
from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, StateSave


class BatchPool(Protocol):
    @property
    def block_size(self) -> int: ...
    @property
    def recurrent(self) -> bool: ...


class BatchState(Protocol):
    """The part of a sequence that a batch reads: a SequenceState, or the copy that another process has
    received."""

    @property
    def pool(self) -> BatchPool: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def length(self) -> int: ...
    @property
    def state_slot(self) -> int | None: ...
    @property
    def state_saves(self) -> list[StateSave]: ...
    @property
    def end_of_step_copies(self) -> list[tuple[int, int]]: ...


@dataclass(frozen=True)
class SequenceSpan:
    """The host's view of one sequence in a step, for code that processes sequences one by one."""

    start: int  # index of its first token in T
    count: int  # new tokens of the sequence
    context_len: int  # tokens in the cache once this step has run
    first_slot: int | None  # first slot of its context if its blocks are adjacent; None: gather them
    state_slot: int = -1  # of its recurrent state
    state_saves: tuple[tuple[int, int], ...] = ()  # (tokens of the span, state slot): saves within it

    def split_at_saves(self) -> Iterator[tuple[slice, int]]:
        """Yield slices of the span's tokens in T and the state slot for the recurrent state after each.

        The last slice ends with the span and goes to the sequence's own state slot.
        """
        begin = 0
        for end, state_slot in (*self.state_saves, (self.count, self.state_slot)):
            yield slice(self.start + begin, self.start + end), state_slot
            begin = end


@dataclass(frozen=True)
class SingleTokenSpans:
    """The sequences with one new token, so that recurrent layers can process them together."""

    token_index: Tensor  # [S] int64, index of their tokens in T
    state_slots: Tensor  # [S] int64
    first_state_slot: int | None  # if their state slots are adjacent; None: gather them

    def gather(self, state: Tensor) -> Tensor:
        """Return their states, [S, ...]: a view if the slots are adjacent, otherwise a copy."""
        if self.first_state_slot is None:
            return state.index_select(0, self.state_slots)
        return state[self.first_state_slot : self.first_state_slot + len(self.state_slots)]

    def scatter(self, state: Tensor, values: Tensor) -> None:
        """Write back `values`, which `gather` returned and which were modified in place."""
        if self.first_state_slot is None:
            state.index_copy_(0, self.state_slots, values)


class CannotCapture(Exception):
    """A kernel needs the host's view of sequences, which a captured step does not have."""


NO_HOST_VIEW = "one of its kernels goes sequence by sequence"


class DeviceOnlySpans(tuple[SequenceSpan, ...]):
    """Spans of a step whose lengths only the device knows; any access raises CannotCapture."""

    def __len__(self) -> int:
        raise CannotCapture(NO_HOST_VIEW)

    def __iter__(self) -> Iterator[SequenceSpan]:
        raise CannotCapture(NO_HOST_VIEW)

    def __getitem__(self, index: object) -> Any:
        raise CannotCapture(NO_HOST_VIEW)


DEVICE_ONLY = DeviceOnlySpans()


@dataclass(frozen=True)
class StateSegments:
    """Token ranges after which a recurrent state is stored, for kernels.

    Sequence i owns the segments first[i] .. first[i + 1] - 1, and segment p ends before token end[p + 1].
    """

    first: Tensor  # [B + 1] int32
    end: Tensor  # [P + 1] int32
    state_slot: Tensor  # [P] int32


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B + 1] int32, index of each sequence's first token in T
    context_len: Tensor  # [B] int32, tokens in the cache once this step has run
    block_table: Tensor  # [B, max_blocks] int32
    slot_mapping: Tensor  # [T] int64, where each token's keys and values are stored
    logit_index: Tensor | None  # [N] int64, the tokens of T whose logits are computed; None: all
    block_size: int
    max_query_len: int  # maximum number of new tokens of a sequence
    uniform_query_len: int | None  # new tokens of every sequence; None: they differ
    state_slots: Tensor | None = None  # [B] int32, of recurrent states
    spans: tuple[SequenceSpan, ...] = DEVICE_ONLY
    copies: CacheCopies = NO_COPIES
    single_token_spans: SingleTokenSpans | None = None  # for recurrent layers
    state_saves: tuple[tuple[int, int], ...] = ()  # (from, to): states to copy after the step
    # Computed once per step, for all layers:
    rope_angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos, sin: [T, 1, dim / 2]
    attention_masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    attention_tasks: dict[int, Tensor] = field(default_factory=dict)  # for attention on a CPU
    workspace_rows: list[Tensor] = field(default_factory=list)  # at most one, of attention that splits the context

    @cached_property
    def state_segments(self) -> StateSegments | None:
        """Segments of all spans; None if no state is saved inside a span."""
        if self.spans is DEVICE_ONLY or not any(span.state_saves for span in self.spans):
            return None
        first, end, slots = [0], [0], []
        for span in self.spans:
            for tokens, slot in span.split_at_saves():
                end.append(tokens.stop)
                slots.append(slot)
            first.append(len(slots))
        return StateSegments(
            *(upload_values(numbers, torch.int32, self.token_ids.device) for numbers in (first, end, slots))
        )

    @classmethod
    def from_states(
        cls,
        states: Sequence[BatchState],
        token_ids: list[list[int]],
        logit_index: list[int],
        device: torch.device,
        copies: CacheCopies = NO_COPIES,
    ) -> "Batch":
        """Build the batch. `token_ids[i]` are the last tokens of `states[i]`, which already has slots for them."""
        size = states[0].pool.block_size
        longest = max(len(s.block_table) for s in states)
        tables, positions, slots, spans, starts, saves = [], list[int](), list[int](), [], [0], []
        for state, tokens in zip(states, token_ids, strict=True):
            blocks, token_positions = state.block_table, range(state.length - len(tokens), state.length)
            tables.append(blocks + [0] * (longest - len(blocks)))
            positions += token_positions
            slots += [blocks[position // size] * size + position % size for position in token_positions]
            are_adjacent = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            spans.append(make_span(state, starts[-1], len(tokens), blocks[0] * size if are_adjacent else None))
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


@dataclass(frozen=True)
class LengthGroup:
    """Texts of one length."""

    start: int  # index of the group's first token in T
    text_count: int
    length: int  # tokens of each

    @property
    def token_slice(self) -> slice:
        return slice(self.start, self.start + self.text_count * self.length)


@dataclass(frozen=True)
class EncoderBatch:
    """Whole texts as flat tensors, one after another and grouped by length.

    Nothing is padded, so that a text's result does not depend on the other texts in the batch.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    groups: tuple[LengthGroup, ...]
    # Computed once, for all layers:
    rope_angles: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos, sin: [T, 1, dim / 2]

    @classmethod
    def from_token_ids(cls, token_ids: Sequence[Sequence[int]], device: torch.device) -> "EncoderBatch":
        """Build a batch of texts that are sorted by length."""
        groups: list[LengthGroup] = []
        begin = 0
        for length, same in groupby(map(len, token_ids)):
            groups.append(LengthGroup(begin, len(list(same)), length))
            begin = groups[-1].token_slice.stop
        return cls(
            token_ids=upload_values([token for ids in token_ids for token in ids], torch.int64, device),
            positions=upload_values(
                [position for ids in token_ids for position in range(len(ids))], torch.int64, device
            ),
            groups=tuple(groups),
        )

    def split_by_length(self, x: Tensor) -> Iterator[Tensor]:
        """Split x [T, ...] into one tensor [texts, length, ...] per group."""
        for group in self.groups:
            yield x[group.token_slice].unflatten(0, (group.text_count, group.length))


def state_slot_tensor(states: Sequence[BatchState], device: torch.device) -> Tensor | None:
    slots = [state.state_slot for state in states if state.state_slot is not None]
    return upload_values(slots, torch.int32, device) if slots else None


def make_span(state: BatchState, start: int, count: int, first_slot: int | None) -> SequenceSpan:
    if state.state_slot is None:
        return SequenceSpan(start, count, state.length, first_slot)
    before = state.length - count
    saves = [(s.length - before, s.slot) for s in state.state_saves if before < s.length < state.length]
    return SequenceSpan(start, count, state.length, first_slot, state.state_slot, tuple(sorted(saves)))


def make_single_token_spans(spans: list[SequenceSpan], device: torch.device) -> SingleTokenSpans | None:
    single = [span for span in spans if span.count == 1]
    if not single:
        return None
    state_slots = [span.state_slot for span in single]
    return SingleTokenSpans(
        token_index=upload_values([span.start for span in single], torch.int64, device),
        state_slots=upload_values(state_slots, torch.int64, device),
        first_state_slot=state_slots[0]
        if state_slots == list(range(state_slots[0], state_slots[0] + len(state_slots)))
        else None,
    )


def upload_values(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device, copied from pinned memory; on a CPU without a copy."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, copied from pinned memory. tensor: on the CPU, not modified afterwards."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_into(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor on the device.

    values: on the CPU, of the target's shape, not modified afterwards.
    """
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)

"""Steps as messages of 32-bit integers, which rank 0 sends and the other ranks run.

A sequence that was in one of the last messages, as many as steps are in flight at a time, is sent as its index
there and the blocks that are new, so that a decode step takes the same few bytes per sequence whatever its
context. Nothing is pickled.
"""

import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from localllm.runtime.batch import Batch
from localllm.runtime.kv_cache.sequence_state import CacheCopies, SequenceState, StateSave
from localllm.runtime.kv_cache.tiers import CopyRun

NEW, NO_SLOT = -1, -1
HIDDEN, HAS_UNREAD, RECURRENT = 1, 2, 4  # bits of a message's flags; those above are the steps to keep
FLAG_BITS = 3


class PoolFacts(NamedTuple):
    """The properties of a block pool that a batch reads."""

    block_size: int
    recurrent: bool


@dataclass
class ReceivedState:
    """The blocks and the state slot of a sequence on another rank, as `Batch.from_states` reads them."""

    pool: PoolFacts
    block_table: list[int]
    length: int
    state_slot: int | None
    state_saves: list[StateSave]

    @property
    def end_of_step_copies(self) -> list[tuple[int, int]]:
        if self.state_slot is None:
            return []
        return [(self.state_slot, save.slot) for save in self.state_saves if save.length == self.length]


class SentTables(NamedTuple):
    """The block tables of a step, as they were sent."""

    states: list[SequenceState]  # kept alive, so that no id is reused
    tables: list[list[int]]


@dataclass
class StepEncoder:
    """Encodes steps; remembers the block tables of the last ones."""

    kept_steps: int = 1
    sent: list[SentTables] = field(default_factory=list)  # newest first
    states: dict[int, int] = field(default_factory=dict)  # id of a state -> its index in the tables of `sent`

    def encode(
        self,
        states: Sequence[SequenceState],
        token_ids: Sequence[Sequence[int]],
        logit_index: Sequence[int],
        copies: CacheCopies,
        *,
        hidden: bool,
        has_unread: bool,
    ) -> bytes:
        """Return the message of a step, whose arguments are those of `Ranks.send_step`."""
        pool = states[0].pool
        flags = HIDDEN * hidden | HAS_UNREAD * has_unread | RECURRENT * pool.recurrent
        flags |= self.kept_steps << FLAG_BITS
        words = [flags, pool.block_size, len(states), len(logit_index), len(copies.blocks), len(copies.states)]
        tables, known = [], [table for step in self.sent for table in step.tables]
        for state, tokens in zip(states, token_ids, strict=True):
            source = self.states.get(id(state), NEW)
            sent = known[source] if source >= 0 else []
            table = state.block_table
            kept = common_prefix(sent, table)
            del sent[kept:]
            sent += table[kept:]  # in place, as tables are long
            tables.append(sent)
            slot = NO_SLOT if state.state_slot is None else state.state_slot
            saves = state.state_saves
            words += (source, kept, len(table) - kept, state.length, len(tokens), slot, len(saves))
            words += table[kept:]
            words += tokens
            for save in saves:
                words += (save.length, save.slot, save.replaces_last)
        words += logit_index
        for run in copies.blocks:
            words += run
        for pair in copies.states:
            words += pair
        self.sent = [SentTables(list(states), tables), *self.sent[: self.kept_steps - 1]]
        alive = [state for step in self.sent for state in step.states]
        self.states = {id(state): index for index, state in reversed(list(enumerate(alive)))}  # the newest
        return array.array("i", words).tobytes()


def common_prefix(sent: list[int], table: list[int]) -> int:
    """Return how many of the first blocks of two tables are the same."""
    count = min(len(sent), len(table))
    if sent[:count] == table[:count]:
        return count
    return next(index for index in range(count) if sent[index] != table[index])


class ReceivedStep(NamedTuple):
    """A step as another rank runs it."""

    states: list[ReceivedState]
    token_ids: list[list[int]]
    logit_index: list[int]
    copies: CacheCopies
    hidden: bool
    has_unread: bool

    def batch(self, device: torch.device) -> Batch:
        return Batch.from_states(self.states, self.token_ids, self.logit_index, device, self.copies)


@dataclass
class StepDecoder:
    """Decodes the messages of a StepEncoder, all of them in order."""

    sent: list[list[list[int]]] = field(default_factory=list)  # block tables of the last steps, newest first

    def decode(self, message: bytes | bytearray) -> ReceivedStep:
        words = array.array("i", message).tolist()
        flags, block_size, count, logit_count, run_count, pair_count = words[:6]
        position, states, token_ids, tables = 6, list[ReceivedState](), list[list[int]](), list[list[int]]()
        known = [table for step in self.sent for table in step]
        pool = PoolFacts(block_size, bool(flags & RECURRENT))
        for _ in range(count):
            source, kept, new, length, token_count, slot, save_count = words[position : position + 7]
            position += 7
            borders = list(pairwise((position, position + new, position + new + token_count)))
            blocks, tokens = (words[begin:end] for begin, end in borders)
            position = borders[-1][1]
            table = (known[source][:kept] if source >= 0 else []) + blocks
            saves = []
            for _ in range(save_count):
                saves.append(StateSave(words[position], words[position + 1], bool(words[position + 2])))
                position += 3
            tables.append(table)
            states.append(ReceivedState(pool, table, length, None if slot == NO_SLOT else slot, saves))
            token_ids.append(tokens)
        logit_index = words[position : position + logit_count]
        position += logit_count
        runs = tuple(CopyRun(*words[position + 3 * i : position + 3 * i + 3]) for i in range(run_count))
        position += 3 * run_count
        pairs = tuple((words[position + 2 * i], words[position + 2 * i + 1]) for i in range(pair_count))
        self.sent = [tables, *self.sent[: (flags >> FLAG_BITS) - 1]]
        copies = CacheCopies(runs, pairs)
        return ReceivedStep(states, token_ids, logit_index, copies, bool(flags & HIDDEN), bool(flags & HAS_UNREAD))

"""The first and the last kernel of a replayed step.

They turn a few values per sequence into the inputs of the layers, and prepare the next step, so that the host has
nothing to upload while the same sequences continue.

inputs: [3 + tokens, max_sequences] int64, a column per sequence of the step: the token slot of its newest token
(an index of `newest`), its recurrent state's slot, its length in the cache (negative: the column is padding), and
its new tokens (negative: the newest token, which only the device knows).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm.runtime.kernels.gpu.launch import allow_next_kernel, launch_kernel, wait_for_inputs

NEWEST_INDEX, STATE_SLOT, CONTEXT_LEN, FIRST_TOKEN = range(4)  # rows of `inputs`; the rest are tokens
PADDING = -1  # as a sequence's length
NEWEST_TOKEN = -1  # as a token id


@dataclass(frozen=True)
class StepColumns:
    """Inputs and outputs of a step of `bucket` sequences with `count` tokens each; all on the device."""

    inputs: Tensor  # [3 + tokens, max_sequences] int64
    newest: Tensor  # [token slots] int64
    tables: Tensor  # [max_sequences, max_blocks] int32, each sequence's block table
    token_ids: Tensor  # [bucket * count] int64
    positions: Tensor  # [bucket * count] int64
    slot: Tensor  # [bucket * count] int64; for padding the first slot of `spare_block`
    context_len: Tensor  # [bucket] int32; 0 for padding
    state_slots: Tensor  # [bucket] int32; `spare_slot` for padding
    count: int
    block_size: int
    spare_block: int
    spare_slot: int


@triton.jit
def begin_step_kernel(
    inputs,
    newest,
    tables,
    token_ids,
    positions,
    slot,
    context_len,
    rows,
    most,
    width,
    spare_block,
    spare_row,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the layers' inputs; one program per sequence."""
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    o_token = tl.arange(0, PADDED)
    m_token = o_token < COUNT
    length = tl.load(inputs + 2 * most + i)
    there = length >= 0
    m_there = o_token < tl.where(there, COUNT, 0)
    token = tl.load(inputs + (3 + o_token) * most + i, m_there, 0)
    # A sampling error value ends the answer, so any token will do.
    last = tl.maximum(tl.load(newest + tl.load(inputs + i), there, 0), 0)
    position = tl.where(there, length + o_token, 0)
    block = tl.load(tables + i.to(tl.int64) * width + position // BLOCK_SIZE, m_there, 0).to(tl.int64)
    place = tl.where(there, block * BLOCK_SIZE + position % BLOCK_SIZE, spare_block * BLOCK_SIZE)
    tl.store(token_ids + i * COUNT + o_token, tl.where(token < 0, last, token), m_token)
    tl.store(positions + i * COUNT + o_token, position, m_token)
    tl.store(slot + i * COUNT + o_token, place, m_token)
    tl.store(context_len + i, tl.where(there, length + COUNT, 0).to(tl.int32))
    tl.store(rows + i, tl.where(there, tl.load(inputs + most + i), spare_row).to(tl.int32))
    allow_next_kernel(PDL)


@triton.jit
def end_step_kernel(
    inputs,
    newest,
    choices,
    most,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Advance a sequence to the next step; one program per sequence."""
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    o_token = tl.arange(0, PADDED)
    length = tl.load(inputs + 2 * most + i)
    there = length >= 0
    chosen = tl.load(choices + i * COUNT + COUNT - 1, there, 0)  # a row without a sequence has none
    tl.store(newest + tl.load(inputs + i), chosen, there)
    tl.debug_barrier()  # all threads have read the length
    tl.store(inputs + 2 * most + i, length + COUNT, there)
    tl.store(inputs + (3 + o_token) * most + i, -1, o_token < tl.where(there, COUNT, 0))
    allow_next_kernel(PDL)


def begin_step(columns: StepColumns) -> None:
    """Write every column except `inputs`, `newest` and `tables`."""
    c = columns
    launch_kernel(
        begin_step_kernel,
        (len(c.context_len),),
        warps=1,
        device=c.inputs.device,
        inputs=c.inputs,
        newest=c.newest,
        tables=c.tables,
        token_ids=c.token_ids,
        positions=c.positions,
        slot=c.slot,
        context_len=c.context_len,
        rows=c.state_slots,
        most=c.inputs.shape[1],
        width=c.tables.shape[1],
        spare_block=c.spare_block,
        spare_row=c.spare_slot,
        COUNT=c.count,
        PADDED=triton.next_power_of_2(c.count),
        BLOCK_SIZE=c.block_size,
    )


def end_step(columns: StepColumns, choices: Tensor) -> None:
    """Make the sampled tokens the newest of each sequence, and its next inputs. choices: [bucket * count] int64"""
    c = columns
    launch_kernel(
        end_step_kernel,
        (len(c.context_len),),
        warps=1,
        device=c.inputs.device,
        inputs=c.inputs,
        newest=c.newest,
        choices=choices,
        most=c.inputs.shape[1],
        COUNT=c.count,
        PADDED=triton.next_power_of_2(c.count),
    )


def examples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the launches that are compiled for GPUs that are not here: docs/kernels.md."""

    def columns(bucket: int, count: int) -> StepColumns:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        tokens, per_sequence = empty(bucket * count), empty(bucket, dtype=torch.int32)
        tables = empty(32, 8192, dtype=torch.int32)
        return StepColumns(
            empty(19, 32),
            empty(32),
            tables,
            tokens,
            tokens,
            tokens,
            per_sequence,
            per_sequence,
            count,
            16,
            1000,
            0,
        )

    def both(bucket: int, count: int) -> None:
        begin_step(columns(bucket, count))
        end_step(columns(bucket, count), torch.empty(bucket * count, dtype=torch.int64, device="meta"))

    yield "32 sequences, a token each", lambda: both(32, 1)
    yield "1 sequence, 16 tokens", lambda: both(1, 16)


def begin_step_reference(columns: StepColumns) -> None:
    c, bucket = columns, len(columns.context_len)
    length, steps = c.inputs[CONTEXT_LEN, :bucket], torch.arange(c.count, device=c.inputs.device)
    is_live = length >= 0
    tokens = c.inputs[FIRST_TOKEN : FIRST_TOKEN + c.count, :bucket].T
    last = c.newest[c.inputs[NEWEST_INDEX, :bucket].where(is_live, 0)].clamp(min=0)[:, None]
    position = (length[:, None] + steps).where(is_live[:, None], 0)
    block = c.tables[:bucket].gather(1, position // c.block_size)
    slot = (block * c.block_size + position % c.block_size).where(is_live[:, None], c.spare_block * c.block_size)
    c.token_ids.copy_(torch.where(tokens < 0, last, tokens).where(is_live[:, None], 0).flatten())
    c.positions.copy_(position.flatten())
    c.slot.copy_(slot.flatten())
    c.context_len.copy_((length + c.count).where(is_live, 0))
    c.state_slots.copy_(c.inputs[STATE_SLOT, :bucket].where(is_live, c.spare_slot))

"""The first and the last kernel of a replayed step."""

import pytest
import torch

from localllm.runtime.kernels.gpu.step import (
    CONTEXT_LEN,
    FIRST_TOKEN,
    NEWEST_INDEX,
    NEWEST_TOKEN,
    PADDING,
    StepColumns,
    begin_step,
    begin_step_reference,
    end_step,
)

MOST, SIZE, WIDTH = 6, 8, 5
MANY = [i % 37 for i in range(90)]  # lengths
WRITTEN = ("token_ids", "positions", "slot", "context_len", "state_slots")


def columns(bucket: int, count: int, lengths: list[int]) -> StepColumns:
    most = max(MOST, bucket)
    generator = torch.Generator().manual_seed(bucket * 31 + count)
    inputs = torch.randint(1000, (FIRST_TOKEN + 16, most), generator=generator)
    inputs[NEWEST_INDEX] = torch.randperm(most, generator=generator)
    inputs[CONTEXT_LEN] = PADDING
    inputs[CONTEXT_LEN, : len(lengths)] = torch.tensor(lengths)
    inputs[FIRST_TOKEN + count - 1, 0] = NEWEST_TOKEN
    inputs[NEWEST_INDEX:CONTEXT_LEN, len(lengths) :] = 10**12  # what nobody has is not looked at
    return StepColumns(
        inputs,
        torch.randint(1000, (most,), generator=generator),
        torch.randint(1, 99, (most, WIDTH), generator=generator, dtype=torch.int32),
        *(torch.full((bucket * count,), -7) for _ in range(3)),
        *(torch.full((bucket,), -7, dtype=torch.int32) for _ in range(2)),
        count,
        SIZE,
        spare_block=99,
        spare_slot=44,
    )


@pytest.mark.parametrize(
    ("bucket", "count", "lengths"),
    [
        (1, 1, [0]),
        (1, 1, [39]),
        (4, 1, [7, 8, 23]),
        (4, 3, [6, 37, 0]),
        (2, 16, [24]),
        (2, 1, []),
        (96, 1, MANY),
    ],
    ids=lambda value: str(value)[:20],
)
def test_begin(interpreter: None, bucket: int, count: int, lengths: list[int]) -> None:
    expected, found = (columns(bucket, count, lengths) for _ in range(2))
    begin_step_reference(expected)
    begin_step(found)
    for name in WRITTEN:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.slot[len(lengths) * count :] == 99 * SIZE).all()
    assert (found.state_slots[len(lengths) :] == 44).all() and (found.context_len[len(lengths) :] == 0).all()
    if lengths:
        assert found.token_ids[count - 1] == found.newest[found.inputs[NEWEST_INDEX, 0]]


def test_end_hands_the_last_choice_on(interpreter: None) -> None:
    c = columns(4, 3, [6, 37])
    before, newest, choices = c.inputs.clone(), c.newest.clone(), torch.arange(1100, 1112)
    end_step(c, choices)
    assert c.newest[before[NEWEST_INDEX, :2]].tolist() == [1102, 1105]
    assert (c.newest != newest).sum() == 2
    before[CONTEXT_LEN, :2] += 3
    before[FIRST_TOKEN : FIRST_TOKEN + 3, :2] = NEWEST_TOKEN
    assert torch.equal(c.inputs, before)

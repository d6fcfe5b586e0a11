import itertools

import pytest

from localllm.tui.inspector.record import AnswerRecord
from localllm.tui.inspector.timeline import StepColumns, TimeScale, draft_cell, prompt_cells, step_time_chart
from tests.tui.inspector.test_record import record_of
from tests.tui.scripted_events import story


def whole(record: AnswerRecord, width: int) -> TimeScale:
    return TimeScale.zoomed(record.ended_s, 0, record.ended_s, width)


def text(row) -> str:
    return "".join(cell for cell, _ in row)


def test_a_scale_has_every_moment_in_its_columns() -> None:
    scale = TimeScale.zoomed(2.0, 0, 2.0, 100)
    assert (scale.column(0.0), scale.column(1.0), scale.column(2.0)) == (0, 49, 99)
    assert scale.time_at(50) == 1.0
    assert scale.columns_between(0.5, 0.5) == range(24, 25)


@pytest.mark.parametrize("at", [0.0, 0.9, 1.1, 2.0])
def test_zooming_keeps_the_selection_visible(at: float) -> None:
    for zoom in range(8):
        scale = TimeScale.zoomed(2.0, zoom, at, 80)
        assert 0 <= scale.column(at) < 80 and scale.span_s == 2.0 / 2**zoom
        assert scale.start_s >= 0 and scale.start_s + scale.span_s <= 2.0 + 1e-9


def test_labels_are_placed_at_their_times() -> None:
    scale = TimeScale.zoomed(2.0, 0, 2.0, 80)
    labels = scale.label_row()
    assert len(labels) == 80
    assert labels.startswith("╷0") and labels.index("╷1.00 s") in (39, 40)


def test_the_prompt_row_has_the_queue_and_each_piece_with_its_tokens() -> None:
    record = record_of(story(4, prompt=600, found=96))
    row = text(prompt_cells(record, whole(record, 60)))
    assert row.startswith("░") and "256" in row and "248" in row
    assert row.index("256") < row.index("248") < len(row.rstrip())


def test_ticks_show_separate_steps_and_gaps() -> None:
    record = record_of(story(20, drafts=False))
    (row,) = StepColumns.from_record(record, whole(record, 600)).step_rows(1)
    ticks = [column for column, (cell, _) in enumerate(row) if cell != " "]
    assert len(ticks) == 21  # the last piece of the prompt brings the first token
    between = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(between) > 2.5 * sorted(between)[len(between) // 2]  # the step that took long


@pytest.mark.parametrize("steps", [1, 5, 5000])
def test_few_and_many_steps_fill_the_same_width(steps: int) -> None:
    record = record_of(story(steps))
    scale = whole(record, 70)
    bins = StepColumns.from_record(record, scale)
    rows = [prompt_cells(record, scale), *bins.step_rows(3), bins.draft_row()]
    assert all(len(row) == 70 for row in rows)
    assert any(cell == "█" for row in rows for cell, _ in row)


def test_drafts_are_judged_column_by_column() -> None:
    assert [draft_cell(*counts)[0] for counts in ((0, 0), (4, 4), (4, 1), (4, 0))] == [" ", "✓", "±", "✗"]
    record = record_of(story(40))
    signs = text(StepColumns.from_record(record, whole(record, 300)).draft_row())
    assert len(signs.replace(" ", "")) == sum(bool(step.report.drafts) for step in record.decode_steps)


def test_a_long_step_is_cut_and_has_another_colour() -> None:
    record = record_of(story(30, drafts=False))
    rows = step_time_chart(record.decode_steps, 3, 0.012, record.decode_steps[3])
    long = max(range(30), key=lambda place: record.decode_steps[place].duration_s)
    assert all(row[long] == ("█", "$error") for row in rows)
    assert rows[-1][3][1].endswith("reverse")

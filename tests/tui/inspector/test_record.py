import math
from itertools import pairwise

import pytest

from localllm.metrics import StepReport
from localllm.request import GenerationEvent
from localllm.tui.inspector.record import MAX_STEPS, TRIM_STEPS, AnswerRecord, DraftStatus
from tests.tui.scripted_events import story, text_of


def record_of(came) -> AnswerRecord:
    record = AnswerRecord(text_of, lambda token: False)
    record.follow(list(came))
    return record


def drafted(drafts: tuple[int, ...], accepted: int, came: tuple[int, ...]) -> list[tuple[float, GenerationEvent]]:
    step = StepReport(0.1, 0.2, 1 + len(drafts), 20, 2, 0, 1, 0, drafts, accepted, prompt=10)
    events = [GenerationEvent(1, "", (token,), step=None if n else step) for n, token in enumerate(came)]
    return [(100.2, event) for event in events]


def test_prompt_chunks_and_steps_are_distinguished() -> None:
    record = record_of(story(40, prompt=600, found=96))
    assert [piece.report.tokens for piece in record.prefill_steps] == [256, 248]
    assert len(record.decode_steps) == 40
    assert record.queue_s == 0.05
    assert record.prefill_steps[-1].token_count == 1 and record.prefill_steps[0].token_count == 0
    assert sum(step.token_count for step in (*record.prefill_steps, *record.decode_steps)) == record.output_count


def test_tokens_are_those_of_the_answer_and_the_drafts_that_were_rejected() -> None:
    events = list(story(40))
    record = record_of(events)
    ids = [token for _, event in events for token in event.token_ids]
    assert [token.id for token in record.tokens if token.draft_status is not DraftStatus.REJECTED] == ids
    measured = events[-1][1].metrics
    right = sum(token.draft_status is DraftStatus.ACCEPTED for token in record.tokens)
    wrong = sum(token.draft_status is DraftStatus.REJECTED for token in record.tokens)
    assert (right, right + wrong) == (measured.accepted_tokens, measured.draft_tokens)


@pytest.mark.parametrize(
    ("accepted", "came", "expected"),
    [
        (0, (9,), "✗5 ✗6 9"),
        (1, (5, 9), "✓5 ✗6 9"),
        (2, (5, 6, 9), "✓5 ✓6 9"),
    ],
)
def test_rejected_drafts_precede_their_replacement(accepted, came, expected) -> None:
    record = record_of(drafted((5, 6), accepted, came))
    marks = {DraftStatus.ACCEPTED: "✓", DraftStatus.REJECTED: "✗", DraftStatus.NONE: ""}
    assert " ".join(marks[token.draft_status] + str(token.id) for token in record.tokens) == expected
    step = record.decode_steps[0]
    assert record.tokens_of(step) == record.tokens and step.token_count == len(came)


def test_each_token_of_a_step_has_its_own_candidates() -> None:
    record = record_of(story(20))
    for token in record.tokens:
        assert (
            token.id in {one.token_id for one in token.candidates}
        ) or token.draft_status is DraftStatus.REJECTED
    assert record.tokens[0].probability == pytest.approx(0.96)
    assert math.isnan(
        next(token for token in record.tokens if token.draft_status is DraftStatus.REJECTED).probability
    )


def test_tokens_are_recorded_without_reports() -> None:
    record = AnswerRecord(lambda token: "", lambda token: False)
    record.follow([(1.0, GenerationEvent(1, "Hello", (3,))), (1.1, GenerationEvent(1, " you", (4,)))])
    assert [(token.number, token.text) for token in record.tokens] == [(0, "Hello"), (1, " you")]
    assert not record.decode_steps and math.isnan(record.queue_s) and math.isnan(record.tokens[0].probability)


def test_queued_answers_have_no_step_yet() -> None:
    waits = StepReport(0.1, 0.1, 0, 0, 0, 0, 2, 1, place=2, prompt=9)
    record = record_of([(100.1, GenerationEvent(1, step=waits))])
    assert not record.prefill_steps and not record.decode_steps and record.newest == waits


def test_memory_is_bounded_however_long_the_answer() -> None:
    record = AnswerRecord(text_of, lambda token: False)
    most = 0
    for came in story(25_000, drafts=False):
        record.follow([came])
        most = max(most, len(record.decode_steps), len(record.tokens))
    assert most <= MAX_STEPS + TRIM_STEPS
    assert record.dropped_steps + len(record.decode_steps) == 25_000
    assert record.dropped_tokens + len(record.tokens) == record.output_count
    assert all(a.number < b.number for a, b in pairwise(record.tokens))
    assert record.prefill_steps and record.tokens[0].number == record.dropped_tokens

"""The engine's reports about an answer: its steps, and its tokens with their candidates.

The beginning of a very long answer is dropped to bound memory. Independent of widgets.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from localllm.metrics import Candidate, Metrics, StepReport
from localllm.tui.answer_thread import TimedEvent

MAX_STEPS = 8192  # and as many tokens
TRIM_STEPS = 1024  # dropped together, since the rest has to be laid out again


class DraftStatus(StrEnum):
    NONE = ""  # not drafted
    ACCEPTED = "accepted"
    REJECTED = "rejected"  # not part of the answer


@dataclass(frozen=True)
class AnswerToken:
    """A token of the answer, or a rejected draft token."""

    number: int  # in the answer, from 0; for a rejected draft, of the token in its place
    id: int
    text: str
    candidates: tuple[Candidate, ...] = ()  # most likely first
    draft_status: DraftStatus = DraftStatus.NONE
    special: bool = False  # a control token, which has no text in the answer

    @property
    def probability(self) -> float:
        """Probability before sampling; NaN if not reported."""
        logprobs = (candidate.logprob for candidate in self.candidates if candidate.token_id == self.id)
        return math.nan if self.draft_status is DraftStatus.REJECTED else math.exp(next(logprobs, math.nan))


@dataclass
class StepRecord:
    """A step of the engine and the answer tokens that it produced."""

    report: StepReport  # without candidates
    first_token: int  # number of its first token
    token_count: int = 0

    @property
    def duration_s(self) -> float:
        return self.report.ended_s - self.report.began_s

    @property
    def is_prefill(self) -> bool:
        """Whether it computed a chunk of the prompt."""
        return self.report.computed <= self.report.prompt


class AnswerRecord:
    """The steps and tokens of one answer."""

    def __init__(self, text_of: Callable[[int], str], is_special: Callable[[int], bool]):
        """text_of: returns a token's text, "" if unknown; is_special: whether a token is a control token"""
        self.text_of = text_of
        self.is_special = is_special
        self.prefill_steps: list[StepRecord] = []
        self.decode_steps: list[StepRecord] = []
        self.tokens: list[AnswerToken] = []
        self.newest: StepReport | None = None  # without candidates
        self.candidates: tuple[tuple[Candidate, ...], ...] = ()  # of the newest step's tokens
        self.current_step: StepRecord | None = None
        self.output_count = 0  # tokens of the answer so far
        self.dropped_steps = self.dropped_tokens = 0  # decode steps, and tokens, dropped from the beginning
        self.metrics: Metrics | None = None

    @property
    def queue_s(self) -> float:
        """Time in the queue before the first step; NaN until then."""
        return self.prefill_steps[0].report.began_s if self.prefill_steps else math.nan

    @property
    def ended_s(self) -> float:
        """End of the newest step, since the request arrived."""
        return self.newest.ended_s if self.newest else 0.0

    def follow(self, events: Sequence[TimedEvent]) -> None:
        for _, event in events:
            if event.step:
                self.add_step(event.step)
            for token in event.token_ids:
                self.add_token(token, event.text)
            self.metrics = event.metrics or self.metrics
        if len(self.decode_steps) > MAX_STEPS + TRIM_STEPS:
            self.dropped_steps += len(self.decode_steps) - MAX_STEPS
            self.decode_steps = self.decode_steps[-MAX_STEPS:]
        if len(self.tokens) > MAX_STEPS + TRIM_STEPS:
            self.dropped_tokens += len(self.tokens) - MAX_STEPS
            self.tokens = self.tokens[-MAX_STEPS:]  # a new list, because the view has laid out the old one

    def tokens_of(self, step: StepRecord) -> list[AnswerToken]:
        """Return a step's tokens, and the draft tokens that it rejected."""
        first = bisect_left(self.tokens, step.first_token, key=lambda token: token.number)
        last = bisect_left(self.tokens, step.first_token + step.token_count, key=lambda token: token.number)
        return self.tokens[first:last]

    def add_step(self, step: StepReport) -> None:
        self.newest, self.candidates = replace(step, candidates=()), step.candidates
        self.current_step = None
        if step.tokens:  # 0 for a request in the queue
            self.current_step = StepRecord(self.newest, self.output_count)
            (self.prefill_steps if self.current_step.is_prefill else self.decode_steps).append(self.current_step)

    def add_token(self, token: int, event_text: str) -> None:
        """Add a token, after the drafts rejected in its place. event_text: its text if `text_of` has none"""
        candidates, status = (), DraftStatus.NONE
        if step := self.current_step:
            position, accepted = step.token_count, step.report.accepted
            candidates = self.candidates[position] if position < len(self.candidates) else ()
            step.token_count += 1
            if position == accepted:
                self.tokens += (
                    AnswerToken(self.output_count, draft, self.text_of(draft), candidates, DraftStatus.REJECTED)
                    for draft in step.report.drafts[accepted:]
                )
            status = DraftStatus.ACCEPTED if position < accepted else DraftStatus.NONE
        text, special = self.text_of(token) or event_text, self.is_special(token)
        self.tokens.append(AnswerToken(self.output_count, token, text, candidates, status, special))
        self.output_count += 1


class NewestCursor:
    """A cursor in a growing list that follows the newest item until the user moves it to another.

    Items may be dropped from the beginning of the list; the cursor then stays on its item.
    """

    selected: int | None = None  # number of the item, including dropped ones; None for the newest

    @property
    def item_counts(self) -> tuple[int, int]:
        """Number of items in the list, and of dropped ones."""
        raise NotImplementedError

    def show_selection(self) -> None:
        """Draw the cursor at `index`."""
        raise NotImplementedError

    @property
    def index(self) -> int:
        """Index of the selected item in the list; -1 if it is empty."""
        count, dropped = self.item_counts
        return count - 1 if self.selected is None else max(0, min(self.selected - dropped, count - 1))

    def select(self, index: int) -> None:
        count, dropped = self.item_counts
        self.selected = None if index >= count - 1 else max(index, 0) + dropped
        self.show_selection()

    def action_move(self, by: int) -> None:
        self.select(self.index + by)

    def action_first(self) -> None:
        self.select(0)

    def action_newest(self) -> None:
        self.select(self.item_counts[0])

"""What the engine reported of an answer, kept for looking at: its steps, and its tokens with what else could have
come. Of a very long answer the beginning is let go, so that memory is bounded. Knows nothing of screens.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from localllm.metrics import Candidate, Metrics, StepReport
from localllm.tui.answering import TimedEvent

MAX_STEPS = 8192  # steps, and as many tokens with their candidates
TRIM_STEPS = 1024  # let go of together, as what is drawn of the rest is then made anew


class DraftStatus(StrEnum):
    NONE = ""  # no draft model or lookup said it before
    ACCEPTED = "accepted"
    REJECTED = "rejected"  # no part of the answer


@dataclass(frozen=True)
class AnswerToken:
    number: int  # of the answer, from 0; of a rejected draft: that of the token that came in its place
    id: int
    text: str
    candidates: tuple[Candidate, ...] = ()  # likeliest first
    draft_status: DraftStatus = DraftStatus.NONE
    special: bool = False  # no part of any text: an end, a mark of the template

    @property
    def probability(self) -> float:
        """By the model's own distribution; NaN where it was not reported."""
        own = (one.logprob for one in self.candidates if one.token_id == self.id)
        return math.nan if self.draft_status is DraftStatus.REJECTED else math.exp(next(own, math.nan))


@dataclass
class StepRecord:
    report: StepReport  # without its candidates
    first_token: int  # of the first token that it brought
    token_count: int = 0  # tokens

    @property
    def took_s(self) -> float:
        return self.report.ended_s - self.report.began_s

    @property
    def is_prefill(self) -> bool:
        """Was it a piece of the prompt?"""
        return self.report.computed <= self.report.prompt


class AnswerRecord:
    """One answer. `pieces` are the steps that read the prompt, `steps` those that followed."""

    def __init__(self, text_of: Callable[[int], str], is_special: Callable[[int], bool]):
        self.text_of = text_of  # "" where it is not known
        self.is_special = is_special
        self.prefill_steps: list[StepRecord] = []
        self.decode_steps: list[StepRecord] = []
        self.tokens: list[AnswerToken] = []
        self.newest: StepReport | None = None  # without its candidates
        self.candidates: tuple[tuple[Candidate, ...], ...] = ()  # of its tokens
        self.current_step: StepRecord | None = None
        self.output_count = 0  # tokens so far
        self.dropped_steps = self.dropped_tokens = 0  # from the beginning
        self.metrics: Metrics | None = None

    @property
    def queue_s(self) -> float:
        """Until its first step began; NaN before."""
        return self.prefill_steps[0].report.began_s if self.prefill_steps else math.nan

    @property
    def ended_s(self) -> float:
        """When its last step had ended."""
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
            self.tokens = self.tokens[-MAX_STEPS:]  # another list: who has laid the old one out still has it

    def tokens_of(self, step: StepRecord) -> list[AnswerToken]:
        """Those that it brought, and the drafts that it rejected."""
        first = bisect_left(self.tokens, step.first_token, key=lambda token: token.number)
        last = bisect_left(self.tokens, step.first_token + step.token_count, key=lambda token: token.number)
        return self.tokens[first:last]

    def add_step(self, step: StepReport) -> None:
        self.newest, self.candidates = replace(step, candidates=()), step.candidates
        self.current_step = None
        if step.tokens:  # else it waits
            self.current_step = StepRecord(self.newest, self.output_count)
            (self.prefill_steps if self.current_step.is_prefill else self.decode_steps).append(self.current_step)

    def add_token(self, token: int, event_text: str) -> None:
        """event_text: by the event that brought it."""
        place, candidates = 0, ()
        if self.current_step:
            place, drafts = self.current_step.token_count, self.current_step.report.drafts
            candidates = self.candidates[place] if place < len(self.candidates) else ()
            accepted = self.current_step.report.accepted
            self.current_step.token_count += 1
            if place == accepted:
                wrong = (
                    AnswerToken(self.output_count, t, self.text_of(t), candidates, DraftStatus.REJECTED)
                    for t in drafts[accepted:]
                )
                self.tokens += wrong
            guess = DraftStatus.ACCEPTED if place < accepted else DraftStatus.NONE
        else:
            guess = DraftStatus.NONE
        text, special = self.text_of(token) or event_text, self.is_special(token)
        self.tokens.append(AnswerToken(self.output_count, token, text, candidates, guess, special))
        self.output_count += 1

"""What the engine reported of an answer, kept for looking at: its steps, and its tokens with what else could have
come. Of a very long answer the beginning is let go, so that memory is bounded. Knows nothing of screens.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from localllm.inspection import Candidate, StepReport
from localllm.metrics import Metrics
from localllm.tui.answering import Came

MOST = 8192  # steps, and as many tokens with their candidates
SPARE = 1024  # let go of together, as what is drawn of the rest is then made anew


class Guess(StrEnum):
    NONE = ""  # no draft model or lookup said it before
    RIGHT = "accepted"
    WRONG = "rejected"  # no part of the answer


@dataclass(frozen=True)
class Token:
    number: int  # of the answer, from 0; of a rejected draft: that of the token that came in its place
    id: int
    text: str
    candidates: tuple[Candidate, ...] = ()  # likeliest first
    guess: Guess = Guess.NONE
    special: bool = False  # no part of any text: an end, a mark of the template

    @property
    def probability(self) -> float:
        """By the model's own distribution; NaN where it was not reported."""
        own = (one.logprob for one in self.candidates if one.token_id == self.id)
        return math.nan if self.guess is Guess.WRONG else math.exp(next(own, math.nan))


@dataclass
class Step:
    report: StepReport  # without its candidates
    number: int  # of the first token that it brought
    came: int = 0  # tokens

    @property
    def took_s(self) -> float:
        return self.report.ended_s - self.report.began_s

    @property
    def reads(self) -> bool:
        """Was it a piece of the prompt?"""
        return self.report.computed <= self.report.prompt


class Record:
    """One answer. `pieces` are the steps that read the prompt, `steps` those that followed."""

    def __init__(self, text_of: Callable[[int], str], is_special: Callable[[int], bool]):
        self.text_of = text_of  # "" where it is not known
        self.is_special = is_special
        self.pieces: list[Step] = []
        self.steps: list[Step] = []
        self.tokens: list[Token] = []
        self.newest: StepReport | None = None  # without its candidates
        self.candidates: tuple[tuple[Candidate, ...], ...] = ()  # of its tokens
        self.step: Step | None = None
        self.output = 0  # tokens so far
        self.gone_steps = self.gone_tokens = 0  # from the beginning
        self.metrics: Metrics | None = None

    @property
    def queue_s(self) -> float:
        """Until its first step began; NaN before."""
        return self.pieces[0].report.began_s if self.pieces else math.nan

    @property
    def ended_s(self) -> float:
        """When its last step had ended."""
        return self.newest.ended_s if self.newest else 0.0

    def follow(self, came: Sequence[Came]) -> None:
        for _, event in came:
            if event.step:
                self.report(event.step)
            for token in event.token_ids:
                self.token(token, event.text)
            self.metrics = event.metrics or self.metrics
        if len(self.steps) > MOST + SPARE:
            self.gone_steps += len(self.steps) - MOST
            self.steps = self.steps[-MOST:]
        if len(self.tokens) > MOST + SPARE:
            self.gone_tokens += len(self.tokens) - MOST
            self.tokens = self.tokens[-MOST:]  # another list: who has laid the old one out still has it

    def tokens_of(self, step: Step) -> list[Token]:
        """Those that it brought, and the drafts that it rejected."""
        first = bisect_left(self.tokens, step.number, key=lambda token: token.number)
        last = bisect_left(self.tokens, step.number + step.came, key=lambda token: token.number)
        return self.tokens[first:last]

    def report(self, step: StepReport) -> None:
        self.newest, self.candidates = replace(step, candidates=()), step.candidates
        self.step = None
        if step.tokens:  # else it waits
            self.step = Step(self.newest, self.output)
            (self.pieces if self.step.reads else self.steps).append(self.step)

    def token(self, token: int, said: str) -> None:
        """said: by the event that brought it."""
        place, candidates = 0, ()
        if self.step:
            place, drafts = self.step.came, self.step.report.drafts
            candidates = self.candidates[place] if place < len(self.candidates) else ()
            accepted = self.step.report.accepted
            self.step.came += 1
            if place == accepted:
                wrong = (
                    Token(self.output, t, self.text_of(t), candidates, Guess.WRONG) for t in drafts[accepted:]
                )
                self.tokens += wrong
            guess = Guess.RIGHT if place < accepted else Guess.NONE
        else:
            guess = Guess.NONE
        text, special = self.text_of(token) or said, self.is_special(token)
        self.tokens.append(Token(self.output, token, text, candidates, guess, special))
        self.output += 1

"""Who guesses, and how much: the one drafter of an engine, made of several."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_budget import (
    FORCED_MATCH,
    MIN_GAIN,
    DraftBudget,
    choose_draft_counts,
    choose_width,
)
from localllm.runtime.speculation.lookup import PromptLookup
from localllm.runtime.speculation.step_cost import StepCost


# Who guesses tokens, so that one step can verify several of them. A guess changes how many tokens a step brings,
# never which.
class Drafter(Protocol):
    def may_draft(self, sequence: Sequence) -> bool:
        """Might it draft behind a token that is being computed? Then that is read before the next step begins."""
        ...

    def draft(self, sequences: list[Sequence]) -> None:
        """Set the drafts of some: at most `room` tokens each. None has an unread token."""
        ...

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step has brought 1 + accepted tokens, of which one was computed for each of `drafted` guesses."""
        ...

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """So long after the step before it a step was done in which each brought one token and its drafts."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


MAX_DRAFTS = 15  # of a sequence: with the token before them they are the widest step that is captured


@dataclass
class DraftTrack:
    """What is kept of a sequence, and what its last draft was."""

    lookup: PromptLookup
    budget: DraftBudget
    match_len: int = 0  # of the match; FORCED: a grammar said it
    cost: float = 0.0  # of its step beyond a plain one, its own share
    by_model: bool = False


def any_width(sequences: int) -> tuple[int, ...]:
    return ()


class SpeculativeDrafter:
    """What a grammar leaves no choice about comes first. Else, where the last three tokens or more stood before in
    prompt or answer, what came next there. Else a draft model, if there is one. Each is cut to what the grammar
    allows.

    How many of the tokens found are verified is chosen for the whole step, so that it brings most tokens for its
    time: chances are learned by how long matches are, prices by timing steps (`gate`, `step_cost`). Where steps
    are
    captured in a few widths all bring equally many, and who has too few drafts fills them up with tokens that
    stand for nothing. A step draws from no more than `max_positions` positions.
    """

    def __init__(
        self,
        step_cost: StepCost,
        max_positions: int,
        widths: Callable[[int], tuple[int, ...]] = any_width,
        prompt_lookup: bool = True,
        draft_model: Drafter | None = None,
    ):
        """max_positions: that a step may draw from; widths: tokens that each of so many sequences may bring in a
        captured
        step, () for any; draft_model: asked where nothing else has a guess."""
        self.step_cost, self.max_positions, self.widths, self.uses_lookup, self.draft_model = (
            step_cost,
            max_positions,
            widths,
            prompt_lookup,
            draft_model,
        )
        self.tracks: dict[Sequence, DraftTrack] = {}
        self.sequences = 1  # of the last step
        self.draft_model_s = 0.0  # that the model took before it
        self.last_budget: DraftBudget | None = None  # of the last sequence that did

    @property
    def max_drafts(self) -> int:
        """Drafts of a step."""
        return max(0, self.max_positions - self.sequences)

    def may_draft(self, sequence: Sequence) -> bool:
        if self.draft_model and self.draft_model.may_draft(sequence):
            return True
        track = self.tracks.get(sequence)  # none is made for one that has ended meanwhile
        if not (track and self.uses_lookup and (length := track.lookup.match())):
            return False
        if track.budget.should_probe:
            return True
        prices = self.step_cost.cost_table(self.sequences, self.max_drafts)
        chances = [track.budget.chances(length, MAX_DRAFTS), *([] for _ in range(self.sequences - 1))]
        return choose_draft_counts(chances, prices)[1] > MIN_GAIN

    def draft(self, sequences: list[Sequence]) -> None:
        ready, self.draft_model_s = [], 0.0
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.computed == 1:
                ready.append(sequence)
            elif self.uses_lookup:
                self.track(sequence).lookup.index_tokens()  # a prompt, while it is being computed
        self.sequences = max(1, len(ready))
        offers = [self.find_drafts(sequence, len(ready)) for sequence in ready]
        if any(offers):
            self.choose_drafts(ready, offers, alone=len(ready) == len(sequences))
        rest = [s for s in ready if len(s.draft_ids) == s.padding_draft_count]
        if self.draft_model and rest:
            self.draft_by_model(self.draft_model, rest, self.max_drafts - sum(len(s.draft_ids) for s in ready))

    def find_drafts(self, sequence: Sequence, beside: int) -> list[int]:
        """What could be drafted without a model."""
        track, constraint = self.track(sequence), sequence.constraint
        most = min(MAX_DRAFTS, sequence.max_drafts, max_rollback(sequence, beside))
        found = constraint.forced(most) if constraint else []
        track.match_len, track.cost, track.by_model = FORCED_MATCH, 0.0, False
        if not found and self.uses_lookup:
            track.match_len = track.lookup.match()
            found = track.lookup.continuation(most)
            if constraint:
                found = constraint.allowed(found)
        return found

    def choose_drafts(self, ready: list[Sequence], candidates: list[list[int]], *, alone: bool) -> None:
        """Draft so much of what is offered as pays, or something of it if that is to be tried. alone: is there
        nothing else in the step?"""
        tracks = [self.tracks[sequence] for sequence in ready]
        prices = self.step_cost.cost_table(self.sequences, self.max_drafts)
        costs = [(price - 1) * len(ready) for price in prices]
        chances = [
            track.budget.chances(track.match_len, min(len(offer), track.budget.affordable_drafts(costs)))
            for track, offer in zip(tracks, candidates, strict=True)
        ]
        # A grammar's masks are no part of what is captured.
        captured = alone and not any(s.constraint for s in ready)
        widths = self.widths(len(ready)) if captured and any(chances) else ()
        fits = [width for width in widths if all(width <= 1 + s.max_drafts for s in ready)]
        if fits:
            width, gain = choose_width(chances, fits, prices)
            if gain < MIN_GAIN:
                tried = any(c and t.budget.should_probe for c, t in zip(chances, tracks, strict=True))
                width = min((w for w in fits if w > 1), default=1) if tried else 1
            counts = [min(len(of), width - 1) for of in chances]
        else:
            width, (counts, gain) = 1, choose_draft_counts(chances, prices)
            if gain < MIN_GAIN:
                counts = [int(bool(c) and t.budget.should_probe) for c, t in zip(chances, tracks, strict=True)]
        total = max(sum(counts), (width - 1) * len(ready))
        if not any(counts) or total > self.max_drafts:
            return
        for sequence, track, offer, count in zip(ready, tracks, candidates, counts, strict=True):
            sequence.draft_ids = offer[:count]
            sequence.padding_draft_count = max(0, width - 1 - count)
            sequence.draft_ids += sequence.token_ids[-1:] * sequence.padding_draft_count
            track.cost = costs[total] * count / sum(counts)

    def draft_by_model(self, model: Drafter, sequences: list[Sequence], max_drafts: int) -> None:
        """Have the model draft for those that nothing else was found for, up to `max_drafts` tokens in all."""
        for sequence in sequences:
            sequence.clear_drafts()
        start = time.perf_counter()
        model.draft(sequences)
        self.draft_model_s = time.perf_counter() - start
        for sequence in sequences:
            drafts = sequence.draft_ids
            if sequence.constraint and drafts:
                drafts = sequence.constraint.allowed(drafts)
            drafts = drafts[: max(0, min(max_drafts, max_rollback(sequence, len(sequences))))]
            if sequence.draft_probs is not None:
                sequence.draft_probs = sequence.draft_probs[: len(drafts)]
            sequence.draft_ids = drafts
            max_drafts -= len(drafts)
            self.tracks[sequence].by_model = True

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        track = self.track(sequence)
        if drafted and not track.by_model:
            track.budget.record_verified(track.match_len, drafted, accepted, track.cost)
        track.budget.add_income(1 + accepted)
        if self.draft_model:
            self.draft_model.on_verified(sequence, *((drafted, accepted) if track.by_model else (0, 0)))

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        step_s, self.draft_model_s = seconds - self.draft_model_s, 0.0
        self.step_cost.record_step(sequences, drafts, step_s)
        if self.draft_model:
            self.draft_model.on_step(sequences, drafts, step_s)

    def forget(self, sequence: Sequence) -> None:
        if track := self.tracks.pop(sequence, None):
            self.last_budget = track.budget
        if self.draft_model:
            self.draft_model.forget(sequence)

    def track(self, sequence: Sequence) -> DraftTrack:
        if sequence not in self.tracks:
            self.tracks[sequence] = DraftTrack(PromptLookup(sequence.token_ids), DraftBudget(self.last_budget))
        return self.tracks[sequence]


def max_rollback(sequence: Sequence, beside: int) -> int:
    """How many drafts can be taken back: recurrent layers need a row for the state before each, which `beside`
    sequences share."""
    assert sequence.state
    pool = sequence.state.pool
    return max(0, pool.state_slots.free_count // beside - 1) if pool.recurrent else MAX_DRAFTS

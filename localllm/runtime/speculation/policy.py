"""The drafter of an engine, which combines grammar, prompt lookup and a draft model."""

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

MAX_DRAFTS = 15  # per sequence: with the token before them, the widest step that is captured


class Drafter(Protocol):
    """Interface of the engine to speculative decoding.

    Drafts let one step verify several tokens. They change how many tokens a step yields, never which.
    """

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether it may draft behind a token that is being computed, which must then be read first."""
        ...

    def draft(self, sequences: list[Sequence]) -> None:
        """Set the drafts of some sequences, at most `max_drafts` each. No sequence has an unread token."""
        ...

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record a step that verified `drafted` tokens and yielded 1 + accepted tokens."""
        ...

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        """Record the duration of a step in which each sequence computed one token and its drafts."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        ...


@dataclass
class DraftTrack:
    """The drafter's state of one sequence, and its last draft."""

    lookup: PromptLookup
    budget: DraftBudget
    match_len: int = 0  # of the last draft; FORCED_MATCH: a grammar forced it
    cost: float = 0.0  # the sequence's share of the step's cost beyond a plain step
    by_model: bool = False


def any_width(sequences: int) -> tuple[int, ...]:
    return ()


class SpeculativeDrafter:
    """Drafts tokens from three sources.

    Tokens that a grammar forces come first. Otherwise, if at least the last three tokens occurred before in prompt
    or answer, the tokens that followed them. Otherwise a draft model, if there is one. All are cut to what the
    grammar allows.

    The number of drafts is chosen for the step as a whole, to maximize tokens per time: probabilities are learned
    by match length (`draft_budget`), costs from the duration of steps (`step_cost`). Where steps are captured in a
    few widths, all sequences have equally many new tokens, and those with too few drafts are padded with
    meaningless ones. A step samples at most `max_positions` positions.
    """

    def __init__(
        self,
        step_cost: StepCost,
        max_positions: int,
        widths: Callable[[int], tuple[int, ...]] = any_width,
        prompt_lookup: bool = True,
        draft_model: Drafter | None = None,
    ):
        """max_positions: maximum number of positions that a step may sample from; widths: returns the tokens per
        sequence that captured steps may have with a given number of sequences, () for any; draft_model: used where
        no other source has drafts.
        """
        self.step_cost, self.max_positions, self.widths, self.uses_lookup, self.draft_model = (
            step_cost,
            max_positions,
            widths,
            prompt_lookup,
            draft_model,
        )
        self.tracks: dict[Sequence, DraftTrack] = {}
        self.sequences = 1  # in the last step
        self.draft_model_s = 0.0  # time that the draft model took before the last step
        self.last_budget: DraftBudget | None = None  # of the last finished sequence

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts in a step."""
        return max(0, self.max_positions - self.sequences)

    def may_draft(self, sequence: Sequence) -> bool:
        if self.draft_model and self.draft_model.may_draft(sequence):
            return True
        track = self.tracks.get(sequence)  # a sequence that has finished meanwhile must not get a track again
        if not (track and self.uses_lookup and (length := track.lookup.match())):
            return False
        if track.budget.should_probe:
            return True
        step_costs = self.step_cost.cost_table(self.sequences, self.max_drafts)
        chances = [track.budget.chances(length, MAX_DRAFTS), *([] for _ in range(self.sequences - 1))]
        return choose_draft_counts(chances, step_costs)[1] > MIN_GAIN

    def draft(self, sequences: list[Sequence]) -> None:
        ready, self.draft_model_s = [], 0.0
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.computed == 1:
                ready.append(sequence)
            elif self.uses_lookup:
                self.track(sequence).lookup.index_tokens()  # of a prompt, while it is being computed
        self.sequences = max(1, len(ready))
        offers = [self.find_drafts(sequence, len(ready)) for sequence in ready]
        if any(offers):
            self.choose_drafts(ready, offers, alone=len(ready) == len(sequences))
        rest = [s for s in ready if len(s.draft_ids) == s.padding_draft_count]
        if self.draft_model and rest:
            self.draft_by_model(self.draft_model, rest, self.max_drafts - sum(len(s.draft_ids) for s in ready))

    def find_drafts(self, sequence: Sequence, sequence_count: int) -> list[int]:
        """Return the tokens that could be drafted without a model."""
        track, constraint = self.track(sequence), sequence.constraint
        max_drafts = min(MAX_DRAFTS, sequence.max_drafts, max_rollback(sequence, sequence_count))
        drafts = constraint.forced(max_drafts) if constraint else []
        track.match_len, track.cost, track.by_model = FORCED_MATCH, 0.0, False
        if not drafts and self.uses_lookup:
            track.match_len = track.lookup.match()
            drafts = track.lookup.continuation(max_drafts)
            if constraint:
                drafts = constraint.allowed(drafts)
        return drafts

    def choose_drafts(self, ready: list[Sequence], candidates: list[list[int]], *, alone: bool) -> None:
        """Draft as many candidates as pay, or a few of them to probe.

        alone: whether the step has no other sequences.
        """
        tracks = [self.tracks[sequence] for sequence in ready]
        step_costs = self.step_cost.cost_table(self.sequences, self.max_drafts)
        costs = [(step_cost - 1) * len(ready) for step_cost in step_costs]
        chances = [
            track.budget.chances(track.match_len, min(len(offer), track.budget.affordable_drafts(costs)))
            for track, offer in zip(tracks, candidates, strict=True)
        ]
        # Captured steps do not support a grammar's masks.
        captured = alone and not any(s.constraint for s in ready)
        widths = self.widths(len(ready)) if captured and any(chances) else ()
        fits = [width for width in widths if all(width <= 1 + s.max_drafts for s in ready)]
        if fits:
            width, gain = choose_width(chances, fits, step_costs)
            if gain < MIN_GAIN:
                probing = any(c and t.budget.should_probe for c, t in zip(chances, tracks, strict=True))
                width = min((w for w in fits if w > 1), default=1) if probing else 1
            counts = [min(len(sequence_chances), width - 1) for sequence_chances in chances]
        else:
            width, (counts, gain) = 1, choose_draft_counts(chances, step_costs)
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
        """Let the model draft for sequences without other drafts, up to `max_drafts` tokens in total."""
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


def max_rollback(sequence: Sequence, sequence_count: int) -> int:
    """Return how many drafts can be rolled back: recurrent layers need a state slot before each draft.

    sequence_count: sequences that share the free state slots.
    """
    assert sequence.state
    pool = sequence.state.pool
    return max(0, pool.state_slots.free_count // sequence_count - 1) if pool.recurrent else MAX_DRAFTS

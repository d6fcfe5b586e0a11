"""Who guesses, and how much: the one drafter of an engine, made of several."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.drafter import Drafter
from localllm.runtime.speculation.gate import FORCED, LEAST_GAIN, Gate, share, widest
from localllm.runtime.speculation.lookup import Lookup
from localllm.runtime.speculation.price import Price

MOST_DRAFTS = 15  # of a sequence: with the token before them they are the widest step that is captured


@dataclass
class Track:
    """What is kept of a sequence, and what its last draft was."""

    lookup: Lookup
    gate: Gate
    length: int = 0  # of the match; FORCED: a grammar said it
    cost: float = 0.0  # of its step beyond a plain one, its own share
    by_model: bool = False


def never(sequences: int) -> tuple[int, ...]:
    return ()


class Speculation:
    """What a grammar leaves no choice about comes first. Else, where the last three tokens or more stood before in
    prompt or answer, what came next there. Else a draft model, if there is one. Each is cut to what the grammar
    allows.

    How many of the tokens found are verified is chosen for the whole step, so that it brings most tokens for its
    time: chances are learned by how long matches are, prices by timing steps (`gate`, `price`). Where steps are
    captured in a few widths all bring equally many, and who has too few drafts fills them up with tokens that
    stand for nothing. A step draws from no more than `rows` positions.
    """

    def __init__(
        self,
        price: Price,
        rows: int,
        widths: Callable[[int], tuple[int, ...]] = never,
        lookup: bool = True,
        model: Drafter | None = None,
    ):
        """rows: that a step may draw from; widths: tokens that each of so many sequences may bring in a captured
        step, () for any; model: asked where nothing else has a guess."""
        self.price, self.rows, self.widths, self.looks_up, self.model = price, rows, widths, lookup, model
        self.tracks: dict[Sequence, Track] = {}
        self.sequences = 1  # of the last step
        self.asked_s = 0.0  # that the model took before it
        self.ended: Gate | None = None  # of the last sequence that did

    @property
    def most(self) -> int:
        """Drafts of a step."""
        return max(0, self.rows - self.sequences)

    def wants(self, sequence: Sequence) -> bool:
        if self.model and self.model.wants(sequence):
            return True
        track = self.tracks.get(sequence)  # none is made for one that has ended meanwhile
        if not (track and self.looks_up and (length := track.lookup.match())):
            return False
        if track.gate.tries:
            return True
        prices = self.price.table(self.sequences, self.most)
        chances = [track.gate.chances(length, MOST_DRAFTS), *([] for _ in range(self.sequences - 1))]
        return share(chances, prices)[1] > LEAST_GAIN

    def draft(self, sequences: list[Sequence]) -> None:
        ready, self.asked_s = [], 0.0
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.computed == 1:
                ready.append(sequence)
            elif self.looks_up:
                self.track(sequence).lookup.take_up()  # a prompt, while it is being computed
        self.sequences = max(1, len(ready))
        offers = [self.offer(sequence, len(ready)) for sequence in ready]
        if any(offers):
            self.choose(ready, offers, alone=len(ready) == len(sequences))
        rest = [s for s in ready if len(s.drafts) == s.filling]
        if self.model and rest:
            self.ask(self.model, rest, self.most - sum(len(s.drafts) for s in ready))

    def offer(self, sequence: Sequence, beside: int) -> list[int]:
        """What could be drafted without a model."""
        track, constraint = self.track(sequence), sequence.constraint
        most = min(MOST_DRAFTS, sequence.room, places(sequence, beside))
        found = constraint.forced(most) if constraint else []
        track.length, track.cost, track.by_model = FORCED, 0.0, False
        if not found and self.looks_up:
            track.length = track.lookup.match()
            found = track.lookup.continuation(most)
            if constraint:
                found = constraint.allowed(found)
        return found

    def choose(self, ready: list[Sequence], offers: list[list[int]], *, alone: bool) -> None:
        """Draft so much of what is offered as pays, or something of it if that is to be tried. alone: is there
        nothing else in the step?"""
        tracks = [self.tracks[sequence] for sequence in ready]
        prices = self.price.table(self.sequences, self.most)
        costs = [(price - 1) * len(ready) for price in prices]
        chances = [
            track.gate.chances(track.length, min(len(offer), track.gate.limit(costs)))
            for track, offer in zip(tracks, offers, strict=True)
        ]
        # A grammar's masks are no part of what is captured.
        captured = alone and not any(s.constraint for s in ready)
        widths = self.widths(len(ready)) if captured and any(chances) else ()
        fits = [width for width in widths if all(width <= 1 + s.room for s in ready)]
        if fits:
            width, gain = widest(chances, fits, prices)
            if gain < LEAST_GAIN:
                tried = any(c and t.gate.tries for c, t in zip(chances, tracks, strict=True))
                width = min((w for w in fits if w > 1), default=1) if tried else 1
            counts = [min(len(of), width - 1) for of in chances]
        else:
            width, (counts, gain) = 1, share(chances, prices)
            if gain < LEAST_GAIN:
                counts = [int(bool(c) and t.gate.tries) for c, t in zip(chances, tracks, strict=True)]
        total = max(sum(counts), (width - 1) * len(ready))
        if not any(counts) or total > self.most:
            return
        for sequence, track, offer, count in zip(ready, tracks, offers, counts, strict=True):
            sequence.drafts = offer[:count]
            sequence.filling = max(0, width - 1 - count)
            sequence.drafts += sequence.token_ids[-1:] * sequence.filling
            track.cost = costs[total] * count / sum(counts)

    def ask(self, model: Drafter, sequences: list[Sequence], most: int) -> None:
        """Have the model draft for those that nothing else was found for, up to `most` tokens in all."""
        for sequence in sequences:
            sequence.forget_drafts()
        start = time.perf_counter()
        model.draft(sequences)
        self.asked_s = time.perf_counter() - start
        for sequence in sequences:
            drafts = sequence.drafts
            if sequence.constraint and drafts:
                drafts = sequence.constraint.allowed(drafts)
            drafts = drafts[: max(0, min(most, places(sequence, len(sequences))))]
            if sequence.proposals is not None:
                sequence.proposals = sequence.proposals[: len(drafts)]
            sequence.drafts = drafts
            most -= len(drafts)
            self.tracks[sequence].by_model = True

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        track = self.track(sequence)
        if drafted and not track.by_model:
            track.gate.verified(track.length, drafted, accepted, track.cost)
        track.gate.brought(1 + accepted)
        if self.model:
            self.model.verified(sequence, *((drafted, accepted) if track.by_model else (0, 0)))

    def stepped(self, sequences: int, drafts: int, seconds: float) -> None:
        step_s, self.asked_s = seconds - self.asked_s, 0.0
        self.price.stepped(sequences, drafts, step_s)
        if self.model:
            self.model.stepped(sequences, drafts, step_s)

    def forget(self, sequence: Sequence) -> None:
        if track := self.tracks.pop(sequence, None):
            self.ended = track.gate
        if self.model:
            self.model.forget(sequence)

    def track(self, sequence: Sequence) -> Track:
        if sequence not in self.tracks:
            self.tracks[sequence] = Track(Lookup(sequence.token_ids), Gate(self.ended))
        return self.tracks[sequence]


def places(sequence: Sequence, beside: int) -> int:
    """How many drafts can be taken back: recurrent layers need a row for the state before each, which `beside`
    sequences share."""
    assert sequence.state
    pool = sequence.state.pool
    return max(0, pool.rows.available // beside - 1) if pool.recurrent else MOST_DRAFTS

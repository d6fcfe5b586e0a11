"""What steps did for the requests that ask to be told of each: noted when a step is launched, told when it is
read.

Costs nothing while nobody asks.
"""

import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from localllm.inspection import Candidate, StepReport
from localllm.runtime.candidates import candidates
from localllm.runtime.sampler import Row
from localllm.runtime.scheduler import Scheduler, Work
from localllm.runtime.sequence import Sequence


@dataclass(frozen=True)
class Look:
    """One sequence in a step that was launched."""

    launched: float  # seconds of `time.perf_counter()`
    tokens: int
    computed: int
    blocks: int
    drafts: tuple[int, ...]
    filling: int  # so many of the last drafts stand for nothing
    rows: ListLike[Row]  # that its tokens are drawn by
    running: int
    waiting: int


class Reports:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.places: dict[Sequence, int] = {}  # of those who ask: told last, 0 for who is worked on

    def watch(self, sequence: Sequence) -> None:
        if sequence.request.inspect is not None:
            self.places[sequence] = 0

    def forget(self, sequence: Sequence) -> None:
        self.places.pop(sequence, None)

    def waits(self) -> list[tuple[Sequence, StepReport]]:
        """Who waits at another place than was told."""
        if not self.places:
            return []
        now = time.perf_counter()
        scheduler, told = self.scheduler, []
        places = {s: place for place, s in enumerate(scheduler.waiting, 1) if s in self.places}
        for sequence, before in self.places.items():
            place = self.places[sequence] = places.get(sequence, 0)
            if place and place != before:
                at = now - sequence.request.arrival
                running, waiting = len(scheduler.running), len(scheduler.waiting) - place
                prompt = sequence.prompt_length
                report = StepReport(at, at, 0, 0, 0, 0, running, waiting, place=place, prompt=prompt)
                told.append((sequence, report))
        return told

    def look(self, work: Work, rows: ListLike[Row], sampling: ListLike[Sequence]) -> dict[Sequence, Look]:
        """At a step as it is launched. rows: those of each of `sampling` after each other."""
        if not self.places:
            return {}
        now, drawn, end = time.perf_counter(), {}, 0
        for sequence in sampling:
            begin, end = end, end + 1 + len(sequence.drafts)
            drawn[sequence] = rows[begin:end]
        return {
            s: Look(
                now,
                count,
                s.computed,
                len(s.state.table) if s.state else 0,
                tuple(s.drafts),
                s.filling,
                drawn.get(s, ()),
                len(self.scheduler.running),
                len(self.scheduler.waiting),
            )
            for s, count in work
            if s in self.places
        }

    @staticmethod
    def report(
        sequence: Sequence,
        look: Look,
        begin: float,
        came: int = 0,
        found: tuple[tuple[Candidate, ...], ...] = (),
    ) -> StepReport:
        """Of a step that has been read. begin: when the one before it was; came: tokens of the answer; found:
        candidates of each."""
        arrival = sequence.request.arrival
        computed, blocks, drafts = look.computed, look.blocks, look.drafts[: len(look.drafts) - look.filling]
        if look.drafts and sequence.state:  # what was guessed wrongly is forgotten by now
            computed, blocks = sequence.computed, len(sequence.state.table)
        return StepReport(
            began_s=max(look.launched, begin) - arrival,
            ended_s=time.perf_counter() - arrival,
            tokens=look.tokens - look.filling,
            computed=computed,
            blocks=blocks,
            found=sequence.cached_tokens or 0,
            running=look.running,
            waiting=look.waiting,
            drafts=drafts,
            accepted=max(0, min(len(drafts), came - 1)),
            candidates=found[:came],
            prompt=sequence.prompt_length,
        )

    @staticmethod
    def candidates(
        sequence: Sequence, look: Look, tokens: ListLike[int], logits: Tensor
    ) -> tuple[tuple[Candidate, ...], ...]:
        """Of each token that came, before any is appended: what they are drawn by changes with that. tokens: drawn
        behind the newest and behind each draft; logits: [tokens, vocab]"""
        count = sequence.request.inspect
        right = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, look.drafts, strict=False))
        came = tokens[: 1 + sum(1 for _ in right)]
        if not count or min(came) < 0:  # a fault
            return ()
        rows = zip(logits, look.rows, came, strict=False)
        return tuple(candidates(row_logits, row, token, count) for row_logits, row, token in rows)

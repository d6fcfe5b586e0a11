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
from localllm.runtime.candidates import likeliest_candidates
from localllm.runtime.sampler import SamplingSpec
from localllm.runtime.scheduler import ScheduledTokens, Scheduler
from localllm.runtime.sequence import Sequence


@dataclass(frozen=True)
class StepObservation:
    """One sequence in a step that was launched."""

    launched_at: float  # seconds of `time.perf_counter()`
    token_count: int
    computed: int
    blocks: int
    draft_ids: tuple[int, ...]
    padding_draft_count: int  # so many of the last drafts stand for nothing
    sampling_specs: ListLike[SamplingSpec]  # that its tokens are drawn by
    running: int
    waiting: int


class StepReporter:
    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.queue_positions: dict[Sequence, int] = {}  # of those who ask: told last, 0 for who is worked on

    def watch(self, sequence: Sequence) -> None:
        if sequence.request.inspect is not None:
            self.queue_positions[sequence] = 0

    def forget(self, sequence: Sequence) -> None:
        self.queue_positions.pop(sequence, None)

    def queue_reports(self) -> list[tuple[Sequence, StepReport]]:
        """Who waits at another place than was told."""
        if not self.queue_positions:
            return []
        now = time.perf_counter()
        scheduler, told = self.scheduler, []
        places = {s: place for place, s in enumerate(scheduler.waiting, 1) if s in self.queue_positions}
        for sequence, before in self.queue_positions.items():
            place = self.queue_positions[sequence] = places.get(sequence, 0)
            if place and place != before:
                at = now - sequence.request.arrival
                running, waiting = len(scheduler.running), len(scheduler.waiting) - place
                prompt = sequence.prompt_len
                report = StepReport(at, at, 0, 0, 0, 0, running, waiting, place=place, prompt=prompt)
                told.append((sequence, report))
        return told

    def observe(
        self, work: ScheduledTokens, specs: ListLike[SamplingSpec], sampling: ListLike[Sequence]
    ) -> dict[Sequence, StepObservation]:
        """At a step as it is launched. specs: those of each of `sampling` after each other."""
        if not self.queue_positions:
            return {}
        now, drawn, end = time.perf_counter(), {}, 0
        for sequence in sampling:
            begin, end = end, end + 1 + len(sequence.draft_ids)
            drawn[sequence] = specs[begin:end]
        return {
            s: StepObservation(
                now,
                count,
                s.computed,
                len(s.state.block_table) if s.state else 0,
                tuple(s.draft_ids),
                s.padding_draft_count,
                drawn.get(s, ()),
                len(self.scheduler.running),
                len(self.scheduler.waiting),
            )
            for s, count in work
            if s in self.queue_positions
        }

    @staticmethod
    def make_report(
        sequence: Sequence,
        observation: StepObservation,
        previous_read_at: float,
        new_token_count: int = 0,
        candidates: tuple[tuple[Candidate, ...], ...] = (),
    ) -> StepReport:
        """Of a step that has been read. previous_read_at: when the one before it was; new_token_count: tokens of
        the answer; candidates:
        candidates of each."""
        arrival = sequence.request.arrival
        computed, blocks, drafts = (
            observation.computed,
            observation.blocks,
            observation.draft_ids[: len(observation.draft_ids) - observation.padding_draft_count],
        )
        if observation.draft_ids and sequence.state:  # what was guessed wrongly is forgotten by now
            computed, blocks = sequence.computed, len(sequence.state.block_table)
        return StepReport(
            began_s=max(observation.launched_at, previous_read_at) - arrival,
            ended_s=time.perf_counter() - arrival,
            tokens=observation.token_count - observation.padding_draft_count,
            computed=computed,
            blocks=blocks,
            found=sequence.cached_tokens or 0,
            running=observation.running,
            waiting=observation.waiting,
            drafts=drafts,
            accepted=max(0, min(len(drafts), new_token_count - 1)),
            candidates=candidates[:new_token_count],
            prompt=sequence.prompt_len,
        )

    @staticmethod
    def candidates_of(
        sequence: Sequence, observation: StepObservation, tokens: ListLike[int], logits: Tensor
    ) -> tuple[tuple[Candidate, ...], ...]:
        """Of each token that came, before any is appended: what they are drawn by changes with that. tokens: drawn
        behind the newest and behind each draft; logits: [tokens, vocab]"""
        count = sequence.request.inspect
        right = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, observation.draft_ids, strict=False))
        came = tokens[: 1 + sum(1 for _ in right)]
        if not count or min(came) < 0:  # a fault
            return ()
        rows = zip(logits, observation.sampling_specs, came, strict=False)
        return tuple(likeliest_candidates(row_logits, row, token, count) for row_logits, row, token in rows)

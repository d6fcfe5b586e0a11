"""What steps did for the requests that ask to be told of each: noted when a step is launched, told when it is
read.

Costs nothing while nobody asks.
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from localllm.metrics import Candidate, StepReport
from localllm.runtime.sampler import SamplingSpec, apply_grammar, apply_penalties, filtered_probabilities
from localllm.runtime.scheduler import ScheduledTokens, Scheduler
from localllm.runtime.sequence import Sequence

# Which tokens could have come, and what kept the others out: the sampler's own rules, one after the other, for
# people who watch. Knows nothing of steps and requests.
NEUTRAL_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the order in which they are applied


def likeliest_candidates(logits: Tensor, spec: SamplingSpec, token: int, count: int) -> tuple[Candidate, ...]:
    """The `count` likeliest, and `token`, which came, where it is not among them; by the model's own distribution.

    logits: [vocab] float32 as the model gave them. `chance` is what the draw is made from: where a draft that was
    drawn itself is verified, the distribution that acceptance and rejection come to.
    """
    logs = logits.log_softmax(-1)
    best = logs.topk(min(count, len(logs))).indices.tolist()
    ids = best if token in best else [*best, token]
    index = torch.tensor(ids, device=logits.device)
    left_out, chances = ~(logits[index] > -torch.inf), logits
    cut_by = [""] * len(ids)
    for name, chances in filter_stages(logits, spec):
        now = ~(chances[index] > 0)
        for place in (now & ~left_out).nonzero()[:, 0].tolist():
            cut_by[place] = name
        left_out |= now
    return tuple(map(Candidate, ids, logs[index].tolist(), chances[index].tolist(), cut_by))


def filter_stages(logits: Tensor, spec: SamplingSpec) -> Iterator[tuple[str, Tensor]]:
    """What each rule leaves, in their order: [vocab] float64 probabilities."""
    changed = logits.clone()[None]
    apply_grammar(changed, [spec])
    yield "grammar", (changed[0] > -torch.inf).double()
    apply_penalties(changed, [spec])
    yield "logit_bias", (changed[0] > -torch.inf).double()
    params, off = spec.params, dict(NEUTRAL_FILTERS)
    if params.temperature == 0:
        yield "temperature", torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, changed[0].argmax(), 1)
        return
    for name in ("temperature", *NEUTRAL_FILTERS):
        off.pop(name, None)
        if name == "temperature" or getattr(params, name) != NEUTRAL_FILTERS[name]:
            weights = filtered_probabilities(changed, [replace(spec, params=replace(params, **off))])[0].double()
            yield name, weights / weights.sum()


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

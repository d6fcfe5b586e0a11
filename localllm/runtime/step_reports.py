"""Reports of single steps for requests with `inspect`: collected at launch, completed when the step is read.

They cost nothing while no request is observed.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from localllm.metrics import Candidate, StepReport
from localllm.runtime.sampler import SamplingSpec, apply_masks, apply_penalties, filtered_probabilities
from localllm.runtime.scheduler import ScheduledTokens, Scheduler
from localllm.runtime.sequence import Sequence

NEUTRAL_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the order in which they are applied


@dataclass(frozen=True)
class StepObservation:
    """The state of one observed sequence when a step was launched."""

    launched_at: float  # seconds of `time.perf_counter()`
    token_count: int
    computed: int
    blocks: int
    draft_ids: tuple[int, ...]
    padding_draft_count: int  # trailing drafts that only pad the step
    sampling_specs: ListLike[SamplingSpec]  # of the step's sampled tokens of this sequence
    running: int
    waiting: int


class StepReporter:
    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter):
        self.scheduler = scheduler
        self.clock = clock
        self.queue_positions: dict[Sequence, int] = {}  # of the observed requests: reported last, 0 once admitted

    def watch(self, sequence: Sequence) -> None:
        if sequence.request.inspect is not None:
            self.queue_positions[sequence] = 0

    def forget(self, sequence: Sequence) -> None:
        self.queue_positions.pop(sequence, None)

    def queue_reports(self) -> list[tuple[Sequence, StepReport]]:
        """Return reports for the observed requests whose position in the queue has changed."""
        if not self.queue_positions:
            return []
        now = self.clock()
        scheduler, reports = self.scheduler, []
        positions = {s: position for position, s in enumerate(scheduler.waiting, 1) if s in self.queue_positions}
        for sequence, before in self.queue_positions.items():
            position = self.queue_positions[sequence] = positions.get(sequence, 0)
            if position and position != before:
                waited_s = now - sequence.request.arrival
                running, waiting = len(scheduler.running), len(scheduler.waiting) - position
                prompt = sequence.prompt_len
                report = StepReport(
                    waited_s, waited_s, 0, 0, 0, 0, running, waiting, place=position, prompt=prompt
                )
                reports.append((sequence, report))
        return reports

    def observe(
        self, work: ScheduledTokens, specs: ListLike[SamplingSpec], sampling: ListLike[Sequence]
    ) -> dict[Sequence, StepObservation]:
        """Record a step as it is launched. specs: those of each sequence of `sampling`, one after another."""
        if not self.queue_positions:
            return {}
        now, sequence_specs, end = self.clock(), {}, 0
        for sequence in sampling:
            begin, end = end, end + 1 + len(sequence.draft_ids)
            sequence_specs[sequence] = specs[begin:end]
        return {
            s: StepObservation(
                now,
                count,
                s.computed,
                len(s.state.block_table) if s.state else 0,
                tuple(s.draft_ids),
                s.padding_draft_count,
                sequence_specs.get(s, ()),
                len(self.scheduler.running),
                len(self.scheduler.waiting),
            )
            for s, count in work
            if s in self.queue_positions
        }

    def make_report(
        self,
        sequence: Sequence,
        observation: StepObservation,
        previous_read_at: float,
        new_token_count: int = 0,
        candidates: tuple[tuple[Candidate, ...], ...] = (),
    ) -> StepReport:
        """Return the report of a step that has been read.

        previous_read_at: time at which the step before it was read; new_token_count: answer tokens of the step;
        candidates: those of each new token.
        """
        arrival = sequence.request.arrival
        computed, blocks, drafts = (
            observation.computed,
            observation.blocks,
            observation.draft_ids[: len(observation.draft_ids) - observation.padding_draft_count],
        )
        if observation.draft_ids and sequence.state:  # wrong drafts are rolled back by now
            computed, blocks = sequence.computed, len(sequence.state.block_table)
        return StepReport(
            began_s=max(observation.launched_at, previous_read_at) - arrival,
            ended_s=self.clock() - arrival,
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
        """Return the candidates of each new token. Call it before tokens are appended, which changes the sampling.

        tokens: sampled behind the newest token and behind each draft; logits: [len(tokens), vocab]
        """
        count = sequence.request.inspect
        accepted = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, observation.draft_ids, strict=False))
        new_tokens = tokens[: 1 + sum(1 for _ in accepted)]
        if not count or min(new_tokens) < 0:  # a sampling error
            return ()
        rows = zip(logits, observation.sampling_specs, new_tokens, strict=False)
        return tuple(likeliest_candidates(row_logits, spec, token, count) for row_logits, spec, token in rows)


def likeliest_candidates(logits: Tensor, spec: SamplingSpec, token: int, count: int) -> tuple[Candidate, ...]:
    """Return the `count` likeliest tokens by the model's own distribution, and the sampled `token` if it is not
    one.

    logits: [vocab] float32, unmodified. A candidate's `chance` is its probability when sampling; for a sampled
    draft that is verified, this is the distribution that acceptance and rejection together yield.
    """
    logs = logits.log_softmax(-1)
    best = logs.topk(min(count, len(logs))).indices.tolist()
    ids = best if token in best else [*best, token]
    token_index = torch.tensor(ids, device=logits.device)
    removed, chances = ~(logits[token_index] > -torch.inf), logits
    cut_by = [""] * len(ids)
    for name, chances in filter_stages(logits, spec):
        is_zero = ~(chances[token_index] > 0)
        for index in (is_zero & ~removed).nonzero()[:, 0].tolist():
            cut_by[index] = name
        removed |= is_zero
    return tuple(map(Candidate, ids, logs[token_index].tolist(), chances[token_index].tolist(), cut_by))


def filter_stages(logits: Tensor, spec: SamplingSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield each filter's name and the probabilities [vocab] float64 that it leaves, in order of application.

    Applies the rules of `sampler.py` one by one, to find which filter removed a token.
    """
    adjusted = logits.clone()[None]
    apply_masks(adjusted, [replace(spec, forbidden_ids=())])
    yield "grammar", (adjusted[0] > -torch.inf).double()
    if spec.forbidden_ids:
        apply_masks(adjusted, [spec])
        yield "min_tokens", (adjusted[0] > -torch.inf).double()
    apply_penalties(adjusted, [spec])
    yield "logit_bias", (adjusted[0] > -torch.inf).double()
    params, disabled = spec.params, dict(NEUTRAL_FILTERS)
    if params.temperature == 0:
        yield "temperature", torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, adjusted[0].argmax(), 1)
        return
    for name in ("temperature", *NEUTRAL_FILTERS):
        disabled.pop(name, None)
        if name == "temperature" or getattr(params, name) != NEUTRAL_FILTERS[name]:
            weights = filtered_probabilities(adjusted, [replace(spec, params=replace(params, **disabled))])[
                0
            ].double()
            yield name, weights / weights.sum()

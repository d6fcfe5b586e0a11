"""The engine loop: schedule, launch, commit. Start reading here.

There is no prefill phase and no decode phase: every sequence has known tokens and computed tokens, and each step
reduces the number that is pending. The engine does not handle text, and a single thread drives it.

On an asynchronous device, step n + 1 is launched before the results of step n are read. Two facts keep this
correct: blocks can be freed at once because the device executes in order, and only tokens that have been read
enter the prefix index.

The stages of a pipeline on several machines compute different steps at a time: the running answers are divided
among that many steps, and the chunks of a prompt follow each other. An answer waits until its last step is read.
Every stage executes in order, too, so that the same two facts hold.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from localllm.errors import LocalLLMError, RankFailed, UsageError
from localllm.metrics import StepReport
from localllm.request import FinishReason, TokenLogprob
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import ALL_FORBIDDEN, NOT_FINITE, parse_logprobs
from localllm.runtime.scheduler import ChunkPolicy, ScheduledTokens, Scheduler
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.policy import Drafter
from localllm.runtime.step import PendingOutput, Step, StepOutput, StepShape
from localllm.runtime.step_reports import StepObservation, StepReporter

SAMPLING_ERRORS: dict[int, Callable[[], LocalLLMError]] = {
    NOT_FINITE: lambda: LocalLLMError("the model computed NaN or infinity", "try --dtype float32"),
    ALL_FORBIDDEN: lambda: UsageError(
        "logit_bias or min_tokens forbids every token that may come", "allow at least one"
    ),
}


LOAD_WAIT_S = 0.05  # that an idle engine waits for the lower tier before it looks for other requests


@dataclass(slots=True)  # not frozen, which would take five times as long to create: there is one for every token
class TokenEvent:
    """Result of a step for one sequence."""

    sequence: Sequence
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: LocalLLMError | None = None
    is_end_token: bool = False  # an end token: it finishes the answer and is not part of it
    drafted: int = 0  # draft tokens that the step verified; set on the first token of a step
    accepted: bool = False  # this token was an accepted draft
    step: StepReport | None = None  # on the first token of a step, or alone, for requests with `inspect`


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device is computing, or the stages of a pipeline, and that has not been read."""

    sequences: list[Sequence]
    token_count: int  # new tokens of the sequences, drafts included
    sampling: list[Sequence]  # those whose newest token is computed in this step, so that the next one is sampled
    draft_counts: list[int]  # drafts that each verifies; copied, as cancelling clears them
    # Sampled tokens in the order of `sampling`: for each sequence one behind its newest token and one behind each
    # draft.
    output: StepOutput | PendingOutput
    prompts: list[tuple[Sequence, range]]  # prompt positions whose log probabilities are reported
    prompt_only: list[Sequence]  # computed prompts of requests without an answer
    observations: dict[Sequence, StepObservation]  # of the requests with `inspect`
    shape: StepShape
    launched_at: float = 0.0  # seconds of the engine's clock


class Engine:
    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        token_budget: int,
        max_running: int,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """clock: returns the time in seconds; a simulation passes its own."""
        self.runner = runner
        self.clock = clock
        self.pool = pool
        self.drafter = drafter
        chunk_policy = None if runner.asynchronous else ChunkPolicy(token_budget, clock)
        self.scheduler = Scheduler(pool, token_budget, max_running, chunk_policy, runner.concurrent_steps)
        self.step_reporter = StepReporter(self.scheduler, clock)
        # Preempted sequences keep their slots and are admitted first.
        self.free_token_slots = list(range(max_running))
        self.in_flight = deque[StepInFlight]()  # oldest first
        self.last_read_at = clock()  # time at which the last step was read
        self.last_shape: StepShape | None = None  # of the step, or round, that was read by the last call of `step`
        self.round: list[StepInFlight] = []  # read steps that continue different sequences, as one step would
        self.steps = self.output_tokens = self.draft_tokens = self.accepted_tokens = 0  # totals since start

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of activations, and of weights that are not quantized."""
        return self.runner.model.dtype

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's tokens are the same whatever else is in the batch."""
        return self.runner.deterministic

    @property
    def no_graphs_reason(self) -> str:
        """Why decode steps are not captured as CUDA graphs; empty if they are, and on a CPU."""
        return "" if self.device.type == "cpu" else self.runner.no_graphs_reason

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens in a step."""
        return self.scheduler.token_budget

    @property
    def block_count(self) -> int:
        """Blocks of the KV cache."""
        return self.pool.count

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.pool.block_size

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.in_flight or self.scheduler.running or self.scheduler.waiting)

    def add_sequence(self, sequence: Sequence) -> list[TokenEvent]:
        """Enqueue a sequence, and return events for the observed requests whose position in the queue changed."""
        self.scheduler.add(sequence)
        self.step_reporter.watch(sequence)
        return self.queue_events()

    def queue_events(self) -> list[TokenEvent]:
        return [TokenEvent(sequence, step=report) for sequence, report in self.step_reporter.queue_reports()]

    def cancel(self, sequence: Sequence) -> None:
        """Finish a sequence early: its blocks are free before the next step, and no further event names it."""
        if not sequence.finished:
            self.finish(sequence)

    @property
    def runs_concurrent_steps(self) -> bool:
        """Whether the stages of a pipeline are computing steps now."""
        return self.runner.concurrent_steps > 1 and bool(self.in_flight)

    @property
    def steps_ahead(self) -> int:
        """Steps that are in flight while the next is scheduled."""
        return 1 if self.runner.asynchronous else self.runner.concurrent_steps - 1

    def preempt_all(self) -> list[TokenEvent]:
        """Preempt every running sequence, to be recomputed later. Returns the events of the steps in flight."""
        events = [event for _ in list(self.in_flight) for event in self.commit()]
        self.runner.receive_hidden()
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        return events

    def replace_caches(self, runner: Runner, pool: BlockPool) -> None:
        """Continue with other caches, and as many sequences per step as the runner allows. No sequence may be
        running."""
        if journal := self.pool.journal:
            journal.clear()
            pool.journal = journal
        self.runner = runner
        self.pool = self.scheduler.pool = pool
        self.scheduler.max_running = runner.max_running
        self.free_token_slots = list(range(runner.max_running))
        for sequence in self.scheduler.waiting:
            sequence.token_slot = -1

    def step(self) -> list[TokenEvent]:
        """Run one step, and return the events of the steps that were read meanwhile."""
        if self.pool.lower:
            wait_s = 0.0 if self.scheduler.running or self.in_flight else LOAD_WAIT_S
            if self.pool.lower.install_loaded(wait_s=wait_s):
                self.scheduler.discard_timing()
        self.last_shape = None
        events = self.commit() if self.must_commit_first() else []
        ready = self.scheduler.choose_group()
        if self.drafter:
            self.drafter.draft([s for s in ready if not s.unread_count and s.max_drafts > 0])
        work = self.scheduler.schedule()
        events += self.queue_events()
        if work:
            self.in_flight.append(self.launch(work))  # the device starts on n + 1 ...
        self.steps += bool(work)
        if not work or len(self.in_flight) > self.steps_ahead:
            events += self.commit()  # ... before the host reads n and waits for it
        return events

    def prefer_throughput(self) -> None:
        """Make steps as large as is fastest for all sequences together: no client reads token by token."""
        if self.scheduler.chunk_policy:
            self.scheduler.chunk_policy.prefer_throughput()

    def reset(self) -> None:
        """Forget the steps in flight and the prefix cache, after a failed step whose sequences are cancelled."""
        self.in_flight.clear()
        self.round.clear()
        self.scheduler.discard_timing()
        self.pool.reset_prefix_cache()

    def close(self) -> None:
        """Store the prefix cache in the lower tier, if there is one. Nothing can run afterwards."""
        with suppress(RankFailed):  # which then has ended already
            self.runner.receive_hidden()  # so that no stage is computing when it receives the message to end
        if self.pool.lower:
            self.pool.lower.close()

    def must_commit_first(self) -> bool:
        """Return whether the next step depends on tokens that only the device knows."""
        if not (self.runner.asynchronous and self.in_flight):
            return False
        sampling = self.in_flight[-1].sampling
        if any(s.needs_host_token or (self.drafter and self.drafter.may_draft(s)) for s in sampling):
            return True
        if not any(s.request.params.uses_penalties for s in sampling):
            return False
        # One sequence that cannot be sampled on the device moves the sampling of its whole step to the host. It
        # may be in the step in flight, although it was cancelled, or come with the next.
        sequences = (*sampling, *self.scheduler.running, *self.scheduler.waiting)
        return any(
            s.constraint
            or (self.drafter and s.state and self.drafter.may_draft(s))
            or not self.runner.samples_on_device(s.request.params, len(s.end_ids))
            for s in sequences
        )

    def launch(self, work: ScheduledTokens) -> StepInFlight:
        """Launch one step for the scheduled sequences, and return it while the device computes."""
        starts = [0, *accumulate(count for _, count in work)]
        sampling, prompt_only, logit_index = list[Sequence](), list[Sequence](), list[int]()
        for (sequence, _), end in zip(work, starts[1:], strict=True):
            if sequence.pending:
                continue
            if sequence.wants_answer:
                sampling.append(sequence)
                logit_index += range(end - 1 - len(sequence.draft_ids), end)
            else:
                prompt_only.append(sequence)
        prompts = []
        for (sequence, count), start in zip(work, starts, strict=False):
            if sequence.needs_whole_prompt and (positions := sequence.take_prompt_positions(count)):
                prompts.append((sequence, positions))
                logit_index += [start + p - (sequence.computed - count) for p in positions]
        for sequence in sampling:
            if sequence.token_slot < 0:
                sequence.token_slot = self.free_token_slots.pop()
        step = self.make_step(work, starts, logit_index, sampling, prompts)
        observations = self.step_reporter.observe(work, step.sampling_specs, sampling)
        launched_at, output = self.clock(), self.runner.run(step)
        for sequence in sampling:
            if self.runner.asynchronous:
                sequence.unread_count = 1
            else:
                sequence.awaits_token = True
        return StepInFlight(
            sequences=[s for s, _ in work],
            token_count=starts[-1],
            sampling=sampling,
            draft_counts=[len(s.draft_ids) for s in sampling],
            output=output,
            prompts=prompts,
            prompt_only=prompt_only,
            observations=observations,
            shape=step_shape(work),
            launched_at=launched_at,
        )

    def make_step(
        self,
        work: ScheduledTokens,
        starts: list[int],
        logit_index: list[int],
        sampling: list[Sequence],
        prompts: list[tuple[Sequence, range]],
    ) -> Step:
        """Build the step.

        starts: index of each sequence's first token, followed by the total; prompts: positions whose log
        probabilities are reported
        """
        if self.pool.recurrent:
            for sequence, count in work:
                sequence.plan_state_saves(count)
        return Step(
            states=[s.state for s, _ in work if s.state],
            token_ids=[s.last_computed_ids(count) for s, count in work],
            logit_index=logit_index,
            sampling_specs=[row for s in sampling for row in s.sampling_specs()],
            token_slots=[s.token_slot for s in sampling],
            unread_tokens=[
                (end - 1, s.token_slot) for (s, _), end in zip(work, starts[1:], strict=True) if s.ends_with_unread
            ],
            keep_logits=any(s.request.inspect for s in sampling),
            logprobs=max((n for s in sampling if (n := s.request.params.logprobs) is not None), default=None),
            prompt_next_ids=[token for s, positions in prompts for token in next_ids(s, positions)],
            prompt_logprobs=max((s.request.params.prompt_logprobs or 0 for s, _ in prompts), default=0),
            copies=self.pool.drain_copies(),
        )

    def commit(self) -> list[TokenEvent]:
        """Read the oldest step in flight, and return its events."""
        if not self.in_flight:
            return []
        launched = self.in_flight.popleft()
        self.last_shape = self.round_shape(launched)
        choices, table, prompt_table = launched.output.results.wait()
        begin = self.last_read_at
        self.report_step_time(launched)
        assert choices is not None
        events = [] if prompt_table is None else prompt_events(launched.prompts, prompt_table)
        events += self.process_output(launched, choices.tolist(), table, begin)
        events += [
            TokenEvent(s, step=self.step_reporter.make_report(s, observation, begin))
            for s, observation in launched.observations.items()
            if not (observation.sampling_specs or s.finished)
        ]
        events += [
            TokenEvent(s, finish_reason=FinishReason.LENGTH) for s in launched.prompt_only if not s.finished
        ]
        # Wrong drafts are rolled back by now, and no block is freed before it is in the prefix index.
        for sequence in launched.sequences:
            if sequence.state:
                sequence.state.cache_full_blocks(sequence.token_ids)
        for event in events:
            if event.finish_reason:
                self.finish(event.sequence)
        return events

    def round_shape(self, launched: StepInFlight) -> StepShape | None:
        """Return the shape of a step that was read.

        Of the concurrent steps of a pipeline, those that continue different sequences are a round, as if they were
        one step: the sum of their shapes comes with the last of them, and None with the others.
        """
        if self.runner.concurrent_steps == 1:
            return launched.shape
        self.round.append(launched)
        following = self.in_flight[0].sequences if self.in_flight else ()
        if following and not {s for step in self.round for s in step.sequences}.intersection(following):
            return None
        steps, self.round = self.round, []
        return StepShape(*map(sum, zip(*(step.shape for step in steps), strict=True)))

    def process_output(
        self, launched: StepInFlight, tokens: list[int], table: Tensor | None, begin: float
    ) -> list[TokenEvent]:
        """Return an event for each sampled token: one per sequence, or several where drafts were accepted.

        table: `logprob_table` of the tokens, if a sequence requests it
        begin: when the step before this one was read
        """
        logits = launched.output.logits
        token_counts = [1 + drafts for drafts in launched.draft_counts]
        logprobs: list[TokenLogprob] = []
        if table is not None:
            top_counts = [s.request.params.logprobs or 0 for s in launched.sampling]
            counts = [n for n, rows in zip(top_counts, token_counts, strict=True) for _ in range(rows)]
            logprobs = parse_logprobs(table, tokens, counts)
        events, end = list[TokenEvent](), 0
        for sequence, count in zip(launched.sampling, token_counts, strict=True):
            sequence.awaits_token = False
            first, end = end, end + count
            if not sequence.finished:
                sequence_logprobs = (
                    logprobs[first:end] if sequence.request.params.logprobs is not None else [None] * count
                )
                observation, candidates = launched.observations.get(sequence), ()
                if observation and logits is not None:
                    candidates = self.step_reporter.candidates_of(
                        sequence, observation, tokens[first:end], logits[first:end]
                    )
                sequence_events = self.accept_tokens(sequence, tokens[first:end], sequence_logprobs)
                if observation:
                    sequence_events[0].step = self.step_reporter.make_report(
                        sequence, observation, begin, len(sequence_events), candidates
                    )
                events += sequence_events
        return events

    def report_step_time(self, launched: StepInFlight) -> None:
        """Report the duration of a step to the drafter if it only continued answers, and in a pipeline to the
        scheduler.

        Steps run without a pause while a sequence continues, no matter how far ahead they are launched: of those
        that overlap, a step takes the time from the reading of the one before it to its own.
        """
        before, self.last_read_at = self.last_read_at, self.clock()
        if self.runner.concurrent_steps > 1:
            seconds = self.last_read_at - max(before, launched.launched_at)
            self.scheduler.record_step(launched.shape.prompt_tokens, seconds)
        drafts = sum(launched.draft_counts)
        if self.drafter and launched.token_count == len(launched.sequences) + drafts:
            self.drafter.on_step(len(launched.sequences), drafts, self.last_read_at - before)

    def accept_tokens(
        self, sequence: Sequence, tokens: list[int], logprobs: ListLike[TokenLogprob | None]
    ) -> list[TokenEvent]:
        """Verify drafts (speculative decoding): append sampled tokens up to the first that differs from its draft.

        The state that was computed for the remaining drafts is rolled back. Returns the events of the tokens.
        """
        drafts, events = sequence.draft_ids, []
        # If the next step is already in flight, it has computed this token and sampled one more.
        sequence.unread_count = int(sequence.ends_with_unread)
        if not drafts:
            sequence.clear_drafts()  # probabilities that belong to no draft any more
            self.output_tokens += 1
            if self.drafter:
                self.drafter.on_verified(sequence, 0, 0)
            return [self.append_token(sequence, tokens[0], logprobs[0])]
        counted = len(drafts) - sequence.padding_draft_count
        sequence.clear_drafts()
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            event = self.append_token(sequence, token, logprob)
            event.drafted, event.accepted = 0 if index else counted, 0 < index <= counted
            events.append(event)
            if event.finish_reason or drafts[index : index + 1] != [token]:
                break
        accepted = min(counted, len(events) - 1)
        self.output_tokens += len(events)
        self.draft_tokens += counted
        self.accepted_tokens += accepted
        if self.drafter:
            self.drafter.on_verified(sequence, counted, accepted)
        if sequence.state:
            sequence.state.rollback(min(sequence.computed, len(sequence.token_ids) - 1))
        return events

    def append_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Append one token, and return its event with the finish reason if it ends the answer."""
        constraint = sequence.constraint
        if token in SAMPLING_ERRORS:
            fault = constraint.fault if constraint else None
            return TokenEvent(sequence, finish_reason=FinishReason.ERROR, error=fault or SAMPLING_ERRORS[token]())
        sequence.token_ids.append(token)
        sequence.output_counts[token] += 1
        is_end = token in sequence.end_ids
        if constraint and not is_end:
            constraint.advance(token)
        reason = None
        if is_end or (constraint and constraint.finished):
            reason = FinishReason.LENGTH if constraint and constraint.cut else FinishReason.STOP
        elif len(sequence.token_ids) >= sequence.max_len:
            reason = FinishReason.LENGTH
        return TokenEvent(sequence, token, logprob, finish_reason=reason, is_end_token=is_end)

    def finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        if self.pool.lower:
            if sequence.prefix_load and not sequence.prefix_load.done:
                self.pool.lower.cancel_load(sequence.prefix_load)
            self.pool.lower.record_prefill(*sequence.measured_prefill)
            if sequence.request.keep and sequence.state and sequence.state.block_serials:
                self.pool.lower.keep(sequence.state.block_serials[-1])
        if self.drafter:
            self.drafter.forget(sequence)
        self.step_reporter.forget(sequence)
        self.scheduler.finish(sequence)
        if sequence.token_slot >= 0:
            self.free_token_slots.append(sequence.token_slot)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Compute logits [T, vocab] float32 of the tokens in one forward pass, next to any running sequences."""
        state = SequenceState(self.pool)
        try:
            state.extend(len(token_ids))
            all_indices = list(range(len(token_ids)))
            batch = self.runner.make_batch([state], [token_ids], all_indices, self.pool.drain_copies())
            return self.runner.launch(batch)
        except OutOfBlocks:
            raise
        except Exception:
            # Other sequences continue, and blocks that were to be offloaded may not have been copied.
            self.pool.reset_prefix_cache()
            raise
        finally:
            state.free()


def step_shape(work: ScheduledTokens) -> StepShape:
    """Return the shape of a step, for whose tokens the sequences already have slots."""
    tokens = context = prompts = prompt_tokens = prompt_context = pairs = 0
    for sequence, count in work:
        length = sequence.computed
        if length > sequence.prompt_len and count == 1 + len(sequence.draft_ids):
            tokens += count
            context += length
        else:
            prompts += 1
            prompt_tokens += count
            prompt_context += length
            pairs += count * (2 * length - count + 1) // 2
    return StepShape(len(work) - prompts, tokens, context, prompts, prompt_tokens, prompt_context, pairs)


def next_ids(sequence: Sequence, positions: range) -> list[int]:
    """Return the tokens that follow these positions."""
    return sequence.token_ids[positions.start + 1 : positions.stop + 1]


def prompt_events(prompts: list[tuple[Sequence, range]], table: Tensor) -> list[TokenEvent]:
    """Return the log probabilities of prompts. table: `logprob_table` of all of their positions"""
    events, end = list[TokenEvent](), 0
    for sequence, positions in prompts:
        first, end = end, end + len(positions)
        if not sequence.finished:
            count = sequence.request.params.prompt_logprobs or 0
            tokens = next_ids(sequence, positions)
            logprobs = parse_logprobs(table[first:end], tokens, [count] * len(tokens))
            events.append(TokenEvent(sequence, prompt_logprobs=tuple(logprobs)))
    return events

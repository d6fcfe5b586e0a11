"""The loop: schedule, launch, commit. The first file to read.

There is no prefill phase and no decode phase: a sequence has tokens that are known and tokens that are computed,
and a step brings each nearer to having none left. The engine knows nothing of text; it is driven by one thread.

On a device that works on by itself, step n + 1 is launched before step n is read. Two facts keep that right:
blocks may be freed at once because the device works in order; only tokens that have been read enter the prefix
index.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from localllm.errors import LocalLLMError, UsageError
from localllm.metrics import StepReport
from localllm.request import FinishReason, TokenLogprob
from localllm.runtime.batch import Batch
from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.runner import Runner
from localllm.runtime.sampler import ALL_FORBIDDEN, NOT_FINITE, compute_logprobs
from localllm.runtime.scheduler import ChunkPolicy, ScheduledTokens, Scheduler
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.policy import Drafter
from localllm.runtime.step import Step, StepOutput
from localllm.runtime.step_reports import StepObservation, StepReporter

SAMPLING_ERRORS: dict[int, Callable[[], LocalLLMError]] = {
    NOT_FINITE: lambda: LocalLLMError("the model computed NaN or infinity", "try --dtype float32"),
    ALL_FORBIDDEN: lambda: UsageError("logit_bias forbids every token that may come", "allow at least one"),
}


@dataclass(frozen=True)
class TokenEvent:
    """What one step brought to one sequence."""

    sequence: Sequence
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: LocalLLMError | None = None
    is_end_token: bool = False  # the token says that the answer ends here, and is no part of it
    drafted: int = 0  # draft tokens that its step verified; with the first token of a step
    accepted: bool = False  # it was one of them
    step: StepReport | None = None  # with the first token of a step, or without one, for those who ask


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device is working on; nothing of it is read before the next has been launched."""

    sequences: list[Sequence]
    token_count: int  # that they brought, drafts among them
    sampling: list[Sequence]  # whose newest token was computed, so that the next was sampled
    draft_counts: list[int]  # how many each of these verifies; it may be cancelled meanwhile
    output: (
        StepOutput  # its choices in the order of `sampling`, behind the newest token of each and behind its drafts
    )
    prompt_logits: list[tuple[Sequence, range, Tensor]]  # prompt positions and their logits [n, vocab]
    prompt_only: list[Sequence]  # prompts that are computed and want no answer
    observations: dict[Sequence, StepObservation]  # of those who ask to be told of each step


class Engine:
    def __init__(
        self, runner: Runner, pool: BlockPool, token_budget: int, max_running: int, drafter: Drafter | None = None
    ):
        self.runner = runner
        self.pool = pool
        self.drafter = drafter
        chunk_policy = None if runner.asynchronous else ChunkPolicy(token_budget)
        self.scheduler = Scheduler(pool, token_budget, max_running, chunk_policy)
        self.step_reporter = StepReporter(self.scheduler)
        self.free_token_slots = list(range(max_running))  # preempted sequences keep theirs and are admitted first
        self.in_flight: StepInFlight | None = None
        self.last_read_at = time.perf_counter()  # when the last step was
        self.steps = self.output_tokens = self.draft_tokens = self.accepted_tokens = 0  # so far

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of weights that are not quantized."""
        return self.runner.model.dtype

    @property
    def deterministic(self) -> bool:
        """Whether a sequence's tokens are the same whatever else is in the batch."""
        return self.runner.deterministic

    @property
    def no_graphs_reason(self) -> str:
        """Why decode steps are not captured as CUDA graphs; empty where they are, and on a CPU."""
        return "" if self.device.type == "cpu" else self.runner.no_graphs_reason

    @property
    def token_budget(self) -> int:
        """Most tokens of a step."""
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
        """Events for those who ask at which place they wait."""
        self.scheduler.add(sequence)
        self.step_reporter.watch(sequence)
        return self.queue_events()

    def queue_events(self) -> list[TokenEvent]:
        return [TokenEvent(sequence, step=report) for sequence, report in self.step_reporter.queue_reports()]

    def cancel(self, sequence: Sequence) -> None:
        """Its blocks are free before the next step; no further event will name it."""
        if not sequence.finished:
            self.finish(sequence)

    def preempt_all(self) -> list[TokenEvent]:
        """Whoever runs waits again, to be computed anew. What the step in flight has brought."""
        events = self.commit()
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        return events

    def replace_caches(self, runner: Runner, pool: BlockPool) -> None:
        """Go on with other caches; nobody runs."""
        self.runner = runner
        self.pool = self.scheduler.pool = pool

    def step(self) -> list[TokenEvent]:
        """Schedule, launch, commit: return what the steps that were read brought."""
        events = self.commit() if self.must_commit_first() else []
        if self.drafter:
            self.drafter.draft([s for s in self.scheduler.running if not s.unread_count and s.max_drafts > 0])
        work = self.scheduler.schedule()
        events += self.queue_events()
        launched = self.launch(work) if work else None  # the device starts on n + 1 ...
        self.steps += launched is not None
        events += self.commit()  # ... before the host reads n and waits for it
        self.in_flight = launched
        return events if self.runner.asynchronous else events + self.commit()

    def prefer_throughput(self) -> None:
        """Make steps as large as is fastest for all sequences together: nobody waits token by token."""
        if self.scheduler.chunk_policy:
            self.scheduler.chunk_policy.prefer_throughput()

    def reset(self) -> None:
        """Forget the step in flight and the prefix cache, after a failed step whose sequences are cancelled."""
        self.in_flight = None
        self.scheduler.discard_timing()
        self.pool.reset_prefix_cache()

    def must_commit_first(self) -> bool:
        """Does the next step depend on tokens that only the device knows?"""
        if self.in_flight is None:
            return False
        sampling = self.in_flight.sampling
        if any(s.needs_host_token or (self.drafter and self.drafter.may_draft(s)) for s in sampling):
            return True
        if not any(s.request.params.uses_penalties for s in sampling):
            return False
        # One of a step's draws that the device cannot do brings them all to the host.
        known = (*self.scheduler.running, *self.scheduler.waiting)
        return not all(self.runner.samples_on_device(s.request.params) for s in known)

    def launch(self, work: ScheduledTokens) -> StepInFlight:
        starts = [0, *accumulate(count for _, count in work)]
        newest = [(s, end) for (s, _), end in zip(work, starts[1:], strict=True) if s.pending == 0]
        sampling = [s for s, _ in newest if s.wants_answer]
        logit_index = [at for s, end in newest if s.wants_answer for at in range(end - 1 - len(s.draft_ids), end)]
        prompts = []
        for (sequence, count), start in zip(work, starts, strict=False):
            if positions := sequence.take_prompt_positions(count):
                prompts.append((sequence, positions))
                logit_index += [start + p - (sequence.computed - count) for p in positions]
        for sequence in sampling:
            if sequence.token_slot < 0:
                sequence.token_slot = self.free_token_slots.pop()
        step = self.make_step(work, starts, logit_index, sampling)
        looks = self.step_reporter.observe(work, step.sampling_specs, sampling)
        drawn = self.runner.run(step)
        for sequence in sampling:
            sequence.unread_count = 1
        told = drawn.prompt_logits.split([len(positions) for _, positions in prompts])
        return StepInFlight(
            sequences=[s for s, _ in work],
            token_count=starts[-1],
            sampling=sampling,
            draft_counts=[len(s.draft_ids) for s in sampling],
            output=drawn,
            prompt_logits=[(s, positions, part) for (s, positions), part in zip(prompts, told, strict=True)],
            prompt_only=[s for s, _ in newest if not s.wants_answer],
            observations=looks,
        )

    def make_step(
        self, work: ScheduledTokens, starts: list[int], logit_index: list[int], sampling: list[Sequence]
    ) -> Step:
        """`starts`: where each sequence's tokens begin, and the end."""
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
            keep_logits=any(s.request.params.logprobs is not None or s.request.inspect for s in sampling),
            copies=self.pool.drain_copies(),
        )

    def commit(self) -> list[TokenEvent]:
        """Read the step in flight and note what it brought."""
        launched, self.in_flight = self.in_flight, None
        if launched is None:
            return []
        events = [
            TokenEvent(s, prompt_logprobs=tuple(prompt_logprobs_of(s, positions, logits)))
            for s, positions, logits in launched.prompt_logits
            if not s.finished
        ]
        begin = self.last_read_at
        events += self.process_output(launched, begin)
        events += [
            TokenEvent(s, step=self.step_reporter.make_report(s, look, begin))
            for s, look in launched.observations.items()
            if not (look.sampling_specs or s.finished)
        ]
        events += [
            TokenEvent(s, finish_reason=FinishReason.LENGTH) for s in launched.prompt_only if not s.finished
        ]
        # What was guessed wrongly is forgotten by now, and nothing is let go that another could find.
        for sequence in launched.sequences:
            if sequence.state:
                sequence.state.cache_full_blocks(sequence.token_ids)
        for event in events:
            if event.finish_reason:
                self.finish(event.sequence)
        return events

    def process_output(self, launched: StepInFlight, begin: float) -> list[TokenEvent]:
        """What was drawn: a token of each sequence, or several where drafts were right. begin: when the step
        before it was read."""
        choices, logits = launched.output.sampled_ids.wait(), launched.output.logits
        self.report_step_time(launched)
        drawn = [1 + drafts for drafts in launched.draft_counts]
        logprobs: list[TokenLogprob] = []
        if logits is not None and any(s.request.params.logprobs is not None for s in launched.sampling):
            wanted = [s.request.params.logprobs or 0 for s in launched.sampling]
            counts = [n for n, rows in zip(wanted, drawn, strict=True) for _ in range(rows)]
            logprobs = compute_logprobs(logits, choices.clamp(min=0).to(logits.device), counts)
        events, tokens, end = [], choices.tolist(), 0
        for sequence, count in zip(launched.sampling, drawn, strict=True):
            first, end = end, end + count
            if not sequence.finished:
                told = logprobs[first:end] if sequence.request.params.logprobs is not None else [None] * count
                look, found = launched.observations.get(sequence), ()
                if look and logits is not None:
                    found = self.step_reporter.candidates_of(sequence, look, tokens[first:end], logits[first:end])
                came = self.accept_tokens(sequence, tokens[first:end], told)
                if look:
                    came[0] = replace(
                        came[0], step=self.step_reporter.make_report(sequence, look, begin, len(came), found)
                    )
                events += came
        return events

    def report_step_time(self, launched: StepInFlight) -> None:
        """Tell the drafter how long it took, if it was one of continuing alone. Steps follow each other without a
        pause while a sequence goes on, however far ahead they are launched."""
        before, self.last_read_at = self.last_read_at, time.perf_counter()
        drafts = sum(launched.draft_counts)
        if self.drafter and launched.token_count == len(launched.sequences) + drafts:
            self.drafter.on_step(len(launched.sequences), drafts, self.last_read_at - before)

    def accept_tokens(
        self, sequence: Sequence, tokens: list[int], logprobs: ListLike[TokenLogprob | None]
    ) -> list[TokenEvent]:
        """Append tokens that have been read, as far as the drafts before each are what was drawn there. What was
        computed of the others is forgotten."""
        drafts, events = sequence.draft_ids, []
        counted = len(drafts) - sequence.padding_draft_count
        # Where the next step is under way already, it has computed this token and sampled one more.
        sequence.unread_count = int(sequence.ends_with_unread)
        sequence.clear_drafts()
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            event = self.append_token(sequence, token, logprob)
            if counted:
                event = replace(event, drafted=0 if place else counted, accepted=0 < place <= counted)
            events.append(event)
            if event.finish_reason or drafts[place : place + 1] != [token]:
                break
        accepted = min(counted, len(events) - 1)
        self.output_tokens += len(events)
        self.draft_tokens += counted
        self.accepted_tokens += accepted
        if self.drafter:
            self.drafter.on_verified(sequence, counted, accepted)
        if drafts and sequence.state:
            sequence.state.rollback(min(sequence.computed, len(sequence.token_ids) - 1))
        return events

    def append_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> TokenEvent:
        """One token more, and whether the answer ends with it."""
        params, constraint = sequence.request.params, sequence.constraint
        if token in SAMPLING_ERRORS:
            fault = constraint.fault if constraint else None
            return TokenEvent(sequence, finish_reason=FinishReason.ERROR, error=fault or SAMPLING_ERRORS[token]())
        sequence.token_ids.append(token)
        sequence.output_counts[token] += 1
        is_end = token in params.stop_ids or (token in sequence.eos_ids and not params.ignore_eos)
        if constraint and not is_end:
            constraint.advance(token)
        reason = None
        if is_end or (constraint and constraint.finished):
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= sequence.max_len:
            reason = FinishReason.LENGTH
        return TokenEvent(sequence, token, logprob, finish_reason=reason, is_end_token=is_end)

    def finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        if self.drafter:
            self.drafter.forget(sequence)
        self.step_reporter.forget(sequence)
        self.scheduler.finish(sequence)
        if sequence.token_slot >= 0:
            self.free_token_slots.append(sequence.token_slot)

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, vocab] float32 in one forward pass over the tokens, beside whatever else is running."""
        state = SequenceState(self.pool)
        try:
            state.extend(len(token_ids))
            every = list(range(len(token_ids)))
            batch = Batch.from_states([state], [token_ids], every, self.runner.device, self.pool.drain_copies())
            return self.runner.launch(batch)
        except OutOfBlocks:
            raise  # before anything was begun
        except Exception:
            self.pool.reset_prefix_cache()  # others go on, and what was to be put aside may not have been
            raise
        finally:
            state.free()


def prompt_logprobs_of(sequence: Sequence, positions: range, logits: Tensor) -> list[TokenLogprob]:
    """Of the tokens that follow these positions of the prompt. logits: [len(positions), vocab]"""
    following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
    count = sequence.request.params.prompt_logprobs or 0
    return compute_logprobs(logits, torch.tensor(following, device=logits.device), [count] * len(following))

"""Continuous batching: which sequences the next step takes, and how many tokens each brings. Chunked prefill: how
much of a long prompt that is. Pure Python over counts, without tensors or models.

Running sequences go before waiting ones and short work before long, so that a long prompt never holds up an
answer that is already streaming; a share of the budget is the first sequence's own, so that it never starves.

First is who has more priority, among equals who came first. Nobody is put back so that another may begin: priority
decides who is admitted next, and who gives its blocks up where there are none left.

A sequence is admitted where there are blocks for what it knows and what it may still say, beside those that run.
What it may say is `max_tokens`, of which at most a quarter of all blocks counts, so that who asks for much more
than it needs keeps no others out. Without `max_tokens` nobody knows it: an even share of the blocks among the most
sequences that may run is counted. What comes on top is overcommitted: the last sequence gives its blocks back, and
is computed again.
"""

import bisect
import math
import time
from collections import deque
from statistics import median

from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.sequence import Sequence

# Chunked prefill: how many prompt tokens a step takes, given how long steps have taken. Pure Python over counts
# and seconds; it knows no sequence.
#
# A chunk delays every answer that streams beside it by the time it takes. So a step with a chunk takes at most
# two and a half times as long as the decoding streams take alone, and never more than 0.4 s: gaps between tokens
# stay even, and prompts still get up to three fifths of the time. Smaller chunks would even the gaps further and
# cost throughput, because each step reads all weights however few tokens it computes. Measured with a 1B model
# in bfloat16 on two cores: 1.15 s for 512 tokens, 0.53 s for 256, 0.36 s for 128, 0.27 s for 64, 0.11 s for one.
MAX_TOKEN_GAP_S = 0.4  # between two tokens of an answer: most people read no faster
MAX_SLOWDOWN = 2.5  # as long as those who stream take alone
UNNOTICED_GAP_S = 0.01  # that nobody sees, however fast they stream
MIN_CHUNK_TOKENS = 64  # tokens
CHUNK_TIMES_KEPT = 8  # times, whose median counts: some were disturbed


class ChunkPolicy:
    """Chunked prefill: how many tokens of prompts a step may compute beside answers that stream."""

    def __init__(self, max_tokens: int):
        """max_tokens: tokens of a step that nobody waits for."""
        self.max_tokens = max_tokens
        self.max_gap_s, self.max_slowdown = MAX_TOKEN_GAP_S, MAX_SLOWDOWN
        self.timed_step: tuple[int, float] | None = None  # prompt tokens of the last step, and when it began
        self.decode_step_s: deque[float] = deque(maxlen=CHUNK_TIMES_KEPT)  # seconds of steps without prompts
        self.prompt_token_s: deque[float] = deque(
            maxlen=CHUNK_TIMES_KEPT
        )  # seconds more that each token of prompts took

    def prefer_throughput(self) -> None:
        """Nobody waits token by token."""
        self.max_gap_s = self.max_slowdown = math.inf

    def begin_step(self) -> None:
        """Record how long the last step took, as the next begins."""
        if self.timed_step:
            prompt_tokens, began = self.timed_step
            self.record_step(prompt_tokens, time.perf_counter() - began)
        self.timed_step = None

    def time_step(self, prompt_tokens: int, began: float) -> None:
        """Take the time of the step that has just been scheduled."""
        self.timed_step = prompt_tokens, began

    def discard_timing(self) -> None:
        """Forget when the last step began: something other than steps has taken time since."""
        self.timed_step = None

    @property
    def typical_decode_step_s(self) -> float:
        return median(self.decode_step_s) if self.decode_step_s else 0.0

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long. A few of them tell nothing."""
        if prompt_tokens == 0:
            self.decode_step_s.append(seconds)
        elif prompt_tokens >= min(MIN_CHUNK_TOKENS, self.max_tokens):
            self.prompt_token_s.append(max(0.0, seconds - self.typical_decode_step_s) / prompt_tokens)

    def chunk_len(self, *, streaming: bool) -> int:
        """Tokens of prompts in the next step; streaming: somebody gets a token with each step."""
        allowed_s = self.max_gap_s
        if streaming and self.decode_step_s:
            allowed_s = min(allowed_s, max(UNNOTICED_GAP_S, self.max_slowdown * self.typical_decode_step_s))
        each_s = median(self.prompt_token_s) if self.prompt_token_s else 0.0
        if each_s == 0 or each_s * self.max_tokens <= allowed_s - self.typical_decode_step_s:
            return self.max_tokens
        return min(self.max_tokens, max(MIN_CHUNK_TOKENS, int((allowed_s - self.typical_decode_step_s) / each_s)))


FIRST_BUDGET_SHARE = 4  # one part in so many of the budget is kept for the first sequence
MAX_ANSWER_SHARE = 4  # one part in so many of all blocks is the most that is reserved for one answer
MAX_PASSED = (
    8  # so many may pass a sequence for which there is no room yet, and so many of the queue are looked at
)

ScheduledTokens = list[tuple[Sequence, int]]


class Scheduler:
    def __init__(
        self, pool: BlockPool, token_budget: int, max_running: int, chunk_policy: ChunkPolicy | None = None
    ):
        """token_budget: most tokens of a step; chunk_policy: how many of them may be of prompts while answers
        stream, None where steps are launched ahead and so cannot be timed."""
        self.pool = pool
        self.chunk_policy = chunk_policy
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # in the order of `turn`
        self.running: list[Sequence] = []
        self.scheduled: dict[Sequence, int] = {}  # of the step being scheduled
        self.remaining_budget = 0  # tokens that it may still take
        self.preemptions = 0  # so far, as what follows
        self.prefix_lookups = self.prefix_hits = (
            0  # sequences that were admitted, and those that found a beginning
        )
        self.prompt_tokens = self.cached_tokens = 0  # theirs, and those that were found

    def add(self, sequence: Sequence) -> None:
        if not self.running and not self.waiting:
            self.discard_timing()
        bisect.insort(self.waiting, sequence, key=queue_key)

    def discard_timing(self) -> None:
        """As `ChunkPolicy.discard_timing`."""
        if self.chunk_policy:
            self.chunk_policy.discard_timing()

    def schedule(self) -> ScheduledTokens:
        """Return the sequences of the next step with the number of tokens each brings, blocks allocated."""
        began, streaming, self.scheduled = time.perf_counter(), self.streaming_tokens, {}
        self.remaining_budget = self.token_budget
        if self.chunk_policy:
            self.chunk_policy.begin_step()
            if self.has_short_work(MIN_CHUNK_TOKENS):
                self.remaining_budget = min(self.token_budget, streaming + self.prompt_budget)
        self.fill_step()
        if self.chunk_policy and self.scheduled:
            self.chunk_policy.time_step(max(0, sum(self.scheduled.values()) - streaming), began)
        return list(self.scheduled.items())

    @property
    def prompt_budget(self) -> int:
        """Most prompt tokens of a step beside the answers that stream now."""
        if self.chunk_policy is None or not self.running:
            return self.token_budget
        return self.chunk_policy.chunk_len(streaming=self.streaming_tokens > 0)

    def fill_step(self) -> None:
        """Share the step's budget among running sequences, and admit waiting ones between short work and long."""
        fair = -(-self.remaining_budget // FIRST_BUDGET_SHARE)
        if self.running:
            self.schedule_tokens(min(self.running, key=priority_key), fair)
        ordered = sorted(self.running, key=lambda s: (s.pending, s.request.id))
        for sequence in ordered:
            if sequence.pending <= fair:
                self.schedule_tokens(sequence, fair)
        self.admit()
        for sequence in ordered:
            self.schedule_tokens(sequence, self.token_budget)

    def schedule_tokens(self, sequence: Sequence, limit: int) -> None:
        """Let a running sequence bring more tokens, as far as the budget and its pending ones go."""
        room = min(limit, self.remaining_budget)
        if sequence.pending > room:
            sequence.clear_drafts()
        if (count := min(sequence.pending, room)) > 0 and (count := self.allocate_slots(sequence, count)):
            self.scheduled[sequence] = self.scheduled.get(sequence, 0) + count
            self.remaining_budget -= count

    def admit(self) -> None:
        """Waiting sequences in their order, as long as they fit beside the running ones. One that does not yet may
        be passed by others, a few times, unless it was preempted: it may keep a row on the device."""
        if not self.waiting:
            return
        promised, at = sum(self.missing_blocks(s) for s in self.running), 0
        while (
            at < min(MAX_PASSED, len(self.waiting))
            and len(self.running) < self.max_running
            and self.remaining_budget
        ):
            sequence = self.waiting[at]
            if self.try_admit(sequence, promised):
                del self.waiting[at]
                for passed in self.waiting[:at]:
                    passed.passed_count += 1
                self.running.append(sequence)
                self.schedule_tokens(sequence, self.remaining_budget)
                promised += self.missing_blocks(sequence)
            elif sequence.was_admitted or sequence.passed_count >= MAX_PASSED:
                break
            else:
                at += 1

    def try_admit(self, sequence: Sequence, reserved_blocks: int) -> bool:
        """Give it the blocks that hold its beginning already, if there are others for the rest beside the blocks
        that are promised. Alone it needs no more than what it knows takes."""
        sequence.state = SequenceState(self.pool, () if sequence.needs_whole_prompt else sequence.token_ids)
        answer = self.reserved_answer_len(sequence) if self.running else 0
        no_blocks = self.missing_blocks(sequence, answer) + reserved_blocks > self.pool.free_count
        if no_blocks or sequence.state.missing_state_slots > self.pool.state_slots.free_count:
            self.free_state(sequence)
            return False
        if not sequence.was_admitted:
            self.record_admission(sequence)
        return True

    def record_admission(self, sequence: Sequence) -> None:
        """It begins for the first time."""
        sequence.stopwatch.mark_scheduled()
        sequence.cached_tokens = sequence.computed
        self.prefix_lookups += 1
        self.prefix_hits += sequence.computed > 0
        self.prompt_tokens += sequence.prompt_len
        self.cached_tokens += sequence.computed

    @property
    def streaming_tokens(self) -> int:
        """Tokens of those who get their next one with each step, drafts among them."""
        return sum(s.pending for s in self.running if s.pending <= 1 + len(s.draft_ids))

    def has_short_work(self, max_pending: int) -> bool:
        """Has anybody no more than so many tokens to compute until the next of its answer?"""
        return any(s.pending <= max_pending for s in (*self.running, *self.waiting[:MAX_PASSED]))

    def reserved_answer_len(self, sequence: Sequence) -> int:
        """How many tokens more are reserved for what it may still say, as far as its limit allows."""
        share = self.max_running if sequence.request.params.max_tokens is None else MAX_ANSWER_SHARE
        return self.pool.count * self.pool.block_size // share

    def missing_blocks(self, sequence: Sequence, answer_len: int | None = None) -> int:
        """How many blocks more it takes to compute all that the sequence knows, and so many tokens of what it may
        still say. None: as many as its budget."""
        assert sequence.state
        known = sequence.computed + sequence.pending
        budget = self.reserved_answer_len(sequence) if answer_len is None else answer_len
        wanted = max(known, min(sequence.max_len, known + budget))
        return -(-wanted // self.pool.block_size) - len(sequence.state.block_table)

    def allocate_slots(self, sequence: Sequence, count: int) -> int:
        """Room for `count` more tokens, or for those of them that are no drafts; where there is none, the last
        sequence gives its blocks up. For how many there is room now: 0 where it was itself the last."""
        while sequence.state:
            try:
                sequence.state.extend(count)
                return count
            except OutOfBlocks:
                if sequence.draft_ids:  # guesses are not worth what another has computed
                    sequence.clear_drafts()
                    count = sequence.pending
                else:
                    self.preempt(max(self.running, key=priority_key))
        return 0

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks; it waits before all that were never admitted, and is computed again."""
        self.free_state(sequence)
        self.remaining_budget += self.scheduled.pop(sequence, 0)
        self.running.remove(sequence)
        self.add(sequence)
        self.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        self.free_state(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    @staticmethod
    def free_state(sequence: Sequence) -> None:
        sequence.clear_drafts()
        if sequence.state:
            sequence.state.free()
            sequence.state = None


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """More priority first, among equals who came first."""
    return -sequence.request.priority, sequence.request.id


def queue_key(sequence: Sequence) -> tuple[bool, int, int]:
    """The order of the queue: those that were preempted first, each by rank."""
    return not sequence.was_admitted, *priority_key(sequence)

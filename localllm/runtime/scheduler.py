"""Continuous batching with chunked prefill: which sequences the next step computes, and how many tokens of each.

Pure Python over counts, without tensors or models.

Running sequences go before waiting ones, and short work before long, so that a long prompt never delays an answer
that is already streaming. A share of the budget is reserved for the first sequence, so that it never starves.

Sequences are ordered by priority, then by arrival. No sequence is preempted to let another begin: priority decides
which is admitted next, and which gives up its blocks when none are left.

A sequence is admitted if there are blocks for its known tokens and for its reserved answer, next to the running
ones. The reservation is `max_tokens`, capped at a quarter of all blocks so that a request with a needlessly large
limit does not keep others out. Without `max_tokens` it is an even share of the blocks among the most sequences
that may run. Blocks beyond the reservation are overcommitted: when they run out, the last sequence is preempted
and recomputed later.

Where a pipeline has several steps in flight, each continues its share of the answers.
"""

import bisect
import math
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from statistics import median

from localllm.runtime.kv_cache.sequence_state import BlockPool, OutOfBlocks, SequenceState
from localllm.runtime.sequence import Sequence

MAX_TOKEN_GAP_S = 0.4  # between two tokens of an answer: most people read no faster
MAX_SLOWDOWN = 2.5  # times the duration of a step that only decodes
UNNOTICED_GAP_S = 0.01  # seconds; a gap that is never noticed, however fast the stream
MIN_CHUNK_TOKENS = 64  # tokens
CHUNK_TIMES_KEPT = 8  # measured steps whose median counts, because some are disturbed by other work
FIRST_BUDGET_SHARE = 4  # 1 / 4 of the budget is reserved for the first sequence
MAX_ANSWER_SHARE = 4  # at most 1 / 4 of all blocks is reserved for one answer
MAX_PASSED = 8  # sequences that may overtake one that does not fit yet, and queue entries considered per step
ScheduledTokens = list[tuple[Sequence, int]]


class ChunkPolicy:
    """Chunked prefill: limits the prompt tokens that a step may compute next to streaming answers.

    A chunk delays every answer that streams next to it. So a step with a chunk takes at most 2.5 times as long as
    the decoding sequences take alone, and never more than 0.4 s: gaps between tokens stay even, and prompts still
    get up to three fifths of the time. Smaller chunks would even the gaps further and cost throughput, because
    each step reads all weights no matter how few tokens it computes. Measured with a 1B model in bfloat16 on two
    cores: 1.15 s for 512 tokens, 0.53 s for 256, 0.36 s for 128, 0.27 s for 64, 0.11 s for one.
    """

    def __init__(self, max_tokens: int, clock: Callable[[], float] = time.perf_counter):
        """max_tokens: prompt tokens of a step while no answer is streaming; clock: returns the time in seconds."""
        self.max_tokens = max_tokens
        self.clock = clock
        self.max_gap_s, self.max_slowdown = MAX_TOKEN_GAP_S, MAX_SLOWDOWN
        self.timed_step: tuple[int, float] | None = None  # prompt tokens of the last step, and when it began
        self.decode_step_s: deque[float] = deque(maxlen=CHUNK_TIMES_KEPT)  # durations of steps without prompts
        # Additional seconds per prompt token.
        self.prompt_token_s: deque[float] = deque(maxlen=CHUNK_TIMES_KEPT)

    def prefer_throughput(self) -> None:
        """Lift the limits on token gaps, for work that does not stream."""
        self.max_gap_s = self.max_slowdown = math.inf

    def begin_step(self) -> None:
        """Record how long the last step took, as the next begins."""
        if self.timed_step:
            prompt_tokens, began = self.timed_step
            self.record_step(prompt_tokens, self.clock() - began)
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
        """Record the duration of a step with this many prompt tokens. Small chunks are too noisy to count."""
        if prompt_tokens == 0:
            self.decode_step_s.append(seconds)
        elif prompt_tokens >= min(MIN_CHUNK_TOKENS, self.max_tokens):
            self.prompt_token_s.append(max(0.0, seconds - self.typical_decode_step_s) / prompt_tokens)

    def chunk_len(self, *, streaming: bool) -> int:
        """Return how many prompt tokens the next step may take.

        streaming: some sequence gets a token each step.
        """
        allowed_s = self.max_gap_s
        if streaming and self.decode_step_s:
            allowed_s = min(allowed_s, max(UNNOTICED_GAP_S, self.max_slowdown * self.typical_decode_step_s))
        token_s = median(self.prompt_token_s) if self.prompt_token_s else 0.0
        if token_s == 0 or token_s * self.max_tokens <= allowed_s - self.typical_decode_step_s:
            return self.max_tokens
        return min(self.max_tokens, max(MIN_CHUNK_TOKENS, int((allowed_s - self.typical_decode_step_s) / token_s)))


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        token_budget: int,
        max_running: int,
        chunk_policy: ChunkPolicy | None = None,
        concurrent_steps: int = 1,
    ):
        """token_budget: maximum tokens per step; chunk_policy: how many of them may be of prompts while answers
        stream, None if steps are launched ahead and so cannot be timed; concurrent_steps: that stages of a
        pipeline compute at a time."""
        self.pool = pool
        self.concurrent_steps = concurrent_steps
        self.held = set[Sequence]()  # answers that a step after the next one continues
        self.chunk_policy = chunk_policy
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: list[Sequence] = []  # sorted by `queue_key`
        self.running: list[Sequence] = []
        self.scheduled: dict[Sequence, int] = {}  # of the step that is being scheduled
        self.remaining_budget = 0  # tokens that this step may still take
        self.preemptions = 0  # totals since start, like the following
        self.prefix_lookups = self.prefix_hits = 0  # admitted sequences, and those with a cached prefix
        self.prompt_tokens = self.cached_tokens = 0  # of admitted sequences, and the cached ones among them
        self.host_tokens = self.disk_tokens = 0  # of the cached ones, by tier; the others were on the device

    def add(self, sequence: Sequence) -> None:
        if not self.running_count and not self.waiting:
            self.discard_timing()
        bisect.insort(self.waiting, sequence, key=self.queue_key)

    @property
    def running_count(self) -> int:
        return len(self.running)

    def discard_timing(self) -> None:
        """See `ChunkPolicy.discard_timing`."""
        if self.chunk_policy:
            self.chunk_policy.discard_timing()

    def record_step(self, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of one of several concurrent steps, as `ChunkPolicy.record_step`."""
        if self.chunk_policy:
            self.chunk_policy.record_step(prompt_tokens, seconds)

    def choose_group(self) -> list[Sequence]:
        """Choose the answers that the next step continues, and return them with the sequences that have a part of
        their prompts left: all that run, unless steps are concurrent.

        Of N concurrent steps, each continues up to 1 / N of the answers, rounded up. None of them waits for more
        than N - 1 steps: while that many full ones are in flight, no more are left than the next one takes.
        """
        if self.concurrent_steps == 1:
            return self.running
        self.discard_timing()  # durations come from `record_step`
        answers = [s for s in self.running if s.pending <= 1 + len(s.draft_ids)]
        ready = [s for s in answers if s.pending]
        self.held = set(ready[-(-len(answers) // self.concurrent_steps) :])
        return [s for s in self.running if not (s.awaits_token or s in self.held)]

    def schedule(self) -> ScheduledTokens:
        """Return the sequences of the next step, each with its number of new tokens, for which blocks are
        allocated."""
        self.scheduled, self.remaining_budget = {}, self.token_budget
        if self.chunk_policy is None:
            self.fill_step()
            return list(self.scheduled.items())
        began, streaming = self.chunk_policy.clock(), self.streaming_tokens
        self.chunk_policy.begin_step()
        if self.has_short_work(MIN_CHUNK_TOKENS):
            self.remaining_budget = min(self.token_budget, streaming + self.prompt_budget)
        self.fill_step()
        if tokens := self.scheduled_tokens:
            self.chunk_policy.time_step(max(0, tokens - streaming), began)
        return list(self.scheduled.items())

    def queue_key(self, sequence: Sequence) -> tuple[bool, int, int]:
        """Return the order of the queue: preempted sequences first, each group by `priority_key`."""
        return not sequence.was_admitted, *priority_key(sequence)

    @property
    def prompt_budget(self) -> int:
        """Maximum number of prompt tokens in a step with the answers that stream now."""
        if self.chunk_policy is None or not self.running_count:
            return self.token_budget
        streaming = self.streaming_tokens > 0 or any(s.awaits_token for s in self.running)
        return self.chunk_policy.chunk_len(streaming=streaming)

    def fill_step(self) -> None:
        """Share the step's budget among running sequences, and admit waiting ones between short work and long."""
        first_share = -(-self.remaining_budget // FIRST_BUDGET_SHARE)
        if self.running:
            self.schedule_tokens(min(self.running, key=priority_key), first_share)
        self.share_budget(first_share)

    def share_budget(self, first_share: int) -> None:
        """Share the remaining budget: sequences with up to `first_share` pending tokens come first, in order of
        work, then waiting ones, then the others."""
        ordered = sorted(((s.pending, s.request.id, s) for s in self.running), key=itemgetter(0, 1))
        unfinished = [  # those with long work, or without enough budget
            s
            for pending, _, s in ordered
            if pending and not (pending <= first_share and self.schedule_tokens(s, first_share))
        ]
        self.admit()
        for sequence in unfinished:
            self.schedule_tokens(sequence, self.token_budget)

    def schedule_tokens(self, sequence: Sequence, limit: int) -> bool:
        """Schedule more tokens of a running sequence, up to its pending ones, `limit` and the remaining budget.

        Returns whether these are all of its pending tokens.
        """
        if sequence in self.held:
            return False
        limit_left, pending = min(limit, self.remaining_budget), sequence.pending
        if pending > limit_left:
            sequence.clear_drafts()
            pending = sequence.pending
        if (count := min(pending, limit_left)) > 0 and (count := self.allocate_slots(sequence, count)):
            self.scheduled[sequence] = self.scheduled.get(sequence, 0) + count
            self.remaining_budget -= count
        return count == pending

    def admit(self) -> None:
        """Admit waiting sequences in order, as long as they fit next to the running ones.

        One that does not fit yet may be overtaken a few times, unless it was preempted: it may hold a token slot.
        One whose prefix is being loaded lets others pass that fit next to it.
        """
        if not self.waiting or self.running_count >= self.max_running or not self.remaining_budget:
            return
        reserved_blocks, index, loading = self.reserved_blocks, 0, list[Sequence]()
        max_loading = self.pool.lower.max_loads if self.pool.lower else 0
        while (
            index < min(MAX_PASSED + len(loading), len(self.waiting))
            and self.running_count < self.max_running
            and self.remaining_budget
        ):
            sequence = self.waiting[index]
            if self.try_admit(sequence, reserved_blocks):
                del self.waiting[index]
                for passed in self.waiting[:index]:
                    passed.passed_count += not passed.is_loading
                self.running.append(sequence)
                self.schedule_tokens(sequence, self.remaining_budget)
                reserved_blocks += self.missing_blocks(sequence)
            elif sequence.is_loading:
                reserved_blocks += sequence.load_blocks
                loading.append(sequence)
                index += 1
                if len(loading) == max_loading:
                    break
            elif sequence.was_admitted or sequence.passed_count >= MAX_PASSED:
                break
            else:
                index += 1
        for sequence in loading:  # after those that do not fit, whose blocks are evicted first
            _, blocks = self.pool.cached_blocks(sequence.token_ids, sequence.request.cache_scope)
            self.pool.mark_used(blocks)

    @property
    def reserved_blocks(self) -> int:
        """Blocks that running sequences lack for their known tokens and the reserved part of their answers."""
        return sum(self.missing_blocks(s) for s in self.running)

    def try_admit(self, sequence: Sequence, reserved_blocks: int) -> bool:
        """Give a sequence the blocks of its cached prefix, if enough others are free beyond `reserved_blocks`.

        One that was preempted while a step samples its next token waits for that token first.

        While no other sequence is running, only its known tokens need to fit. One that fits begins to load what a
        lower tier has of its prefix, and is admitted when that is done. Nothing is loaded or copied to the device
        for one that does not fit: what it needs would be evicted again before it is admitted.
        """
        if sequence.is_loading or sequence.awaits_token:
            return False
        pool, scope = self.pool, sequence.request.cache_scope
        blocks, serials = pool.find_longest_prefix(
            () if sequence.needs_whole_prompt else sequence.token_ids, scope
        )
        answer_len = self.reserved_answer_len(sequence) if self.running_count else 0
        used_count = len(blocks) - pool.unused_count(blocks)  # by running sequences
        too_few_blocks = self.missing_blocks(sequence, answer_len) - used_count + reserved_blocks > pool.free_count
        if too_few_blocks or (pool.recurrent and not pool.state_slots.free_count):
            pool.mark_prefix_used(blocks, serials)
            return False
        if sequence.prefix_load is None and not sequence.needs_whole_prompt:
            sequence.prefix_load = pool.begin_load(sequence.token_ids, scope)
            if sequence.is_loading:
                sequence.load_blocks = self.missing_blocks(sequence) - used_count
                return False
        sequence.state = SequenceState(pool, scope=scope)
        sequence.state.share_prefix(blocks, serials)
        if not sequence.was_admitted:
            self.record_admission(sequence)
        return True

    def record_admission(self, sequence: Sequence) -> None:
        """Count the first admission of a sequence and its prefix cache hit."""
        cached, load = sequence.computed, sequence.prefix_load
        if load and load.computed:  # by another process, so that they were not cached
            cached = max(0, cached - load.computed)
            sequence.stopwatch.mark_scheduled(load.began)
        sequence.stopwatch.mark_scheduled()
        sequence.cached_tokens = cached
        self.prefix_lookups += 1
        self.prefix_hits += cached > 0
        self.prompt_tokens += sequence.prompt_len
        self.cached_tokens += cached
        self.disk_tokens += sequence.disk_tokens
        if sequence.state:
            self.host_tokens += sequence.state.restored_blocks * self.pool.block_size

    @property
    def streaming_tokens(self) -> int:
        """Tokens of the next step that belong to streaming answers, drafts included."""
        return sum(s.pending for s in self.running if s.pending <= 1 + len(s.draft_ids))

    @property
    def scheduled_tokens(self) -> int:
        """Tokens of the step that is being scheduled."""
        return sum(self.scheduled.values())

    def has_short_work(self, max_pending: int) -> bool:
        """Return whether any sequence needs at most `max_pending` tokens until the next token of its answer."""
        return any(s.pending <= max_pending for s in (*self.running, *self.waiting[:MAX_PASSED]))

    def reserved_answer_len(self, sequence: Sequence) -> int:
        """Return how many answer tokens are reserved for a sequence, before its own limit is applied."""
        share = self.max_running if sequence.request.params.max_tokens is None else MAX_ANSWER_SHARE
        return self.pool.count * self.pool.block_size // share

    def missing_blocks(self, sequence: Sequence, answer_len: int | None = None) -> int:
        """Return how many more blocks the known tokens and `answer_len` answer tokens need.

        answer_len: None reserves as much as `reserved_answer_len`.
        """
        known_len = sequence.computed + sequence.pending
        if answer_len is None:
            answer_len = self.reserved_answer_len(sequence)
        allocated = len(sequence.state.block_table) if sequence.state else 0
        return self.blocks_of(sequence, known_len, answer_len) - allocated

    def blocks_of(self, sequence: Sequence, known_len: int, answer_len: int) -> int:
        """Return the blocks of known tokens and up to `answer_len` more, within the limit of the sequence."""
        return -(-max(known_len, min(sequence.max_len, known_len + answer_len)) // self.pool.block_size)

    def allocate_slots(self, sequence: Sequence, count: int) -> int:
        """Allocate slots for `count` more tokens, or without the drafts among them, preempting others if
        necessary.

        Returns the number of tokens that have slots now: 0 if the sequence was itself the last and was preempted.
        """
        while sequence.state:
            try:
                sequence.state.extend(count)
                return count
            except OutOfBlocks:
                if sequence.draft_ids:  # drafts are not worth preempting another sequence
                    sequence.clear_drafts()
                    count = sequence.pending
                else:
                    self.preempt(max(self.running, key=priority_key))
        return 0

    def preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence and requeue it ahead of the sequences that were never admitted."""
        self.free_state(sequence)
        sequence.prefix_load = None
        self.remaining_budget += self.scheduled.pop(sequence, 0)
        self.running.remove(sequence)
        self.add(sequence)
        self.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        self.free_state(sequence)
        for queue in (self.running, self.waiting):  # thousands may be waiting
            if sequence in queue:
                queue.remove(sequence)
                break

    @staticmethod
    def free_state(sequence: Sequence) -> None:
        sequence.clear_drafts()
        if state := sequence.state:
            if journal := state.pool.journal:
                names, full_blocks = sequence.request.prefix_names, sequence.prompt_len // state.pool.block_size
                journal.record(names.names, state.block_serials[:full_blocks], names.share)
            state.free()
            sequence.state = None


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """Order by descending priority, then by arrival."""
    return -sequence.request.priority, sequence.request.id

"""The thread that drives the engine, and the path of its tokens to a reader: detokenization, parsing of reasoning
and tool calls, stop strings, metrics, one queue per request, cancellation."""

import contextlib
import dataclasses
import hashlib
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import cached_property
from typing import TypeVar

import torch

from localllm.errors import ContextOverflow, LocalLLMError, QueueFull, WaitForecast
from localllm.hardware.device import device_context, peak_bytes, release_cached
from localllm.llm.slots import SlotTable
from localllm.metrics import EngineStats, Slot, TierMove
from localllm.plan.step_times import MAX_STEPS
from localllm.request import EventType, FinishReason, GenerationEvent, ToolCall
from localllm.runtime.device_errors import engine_failure_error, is_engine_failure, is_out_of_memory
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.runtime.sequence import Sequence
from localllm.runtime.step import StepShape
from localllm.text.detokenizer import Detokenizer, StopStrings
from localllm.text.output.reader import OutputDelta, OutputParser
from localllm.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_QUEUE = 512  # sequences
RECENT_STEPS, RECENT_ANSWERS = 512, 128  # from which the waiting time in a full queue is predicted
NO_TEXT = OutputDelta(EventType.CONTENT)
Delivered = GenerationEvent | BaseException  # an error ends its answer
Deliver = Callable[[list[Delivered]], object]


class RequestOutput:
    """Turns a request's tokens into events for its reader."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        output_parser: OutputParser,
        shown_ids: Collection[int],
        deliver: Deliver | None = None,
        wake: Callable[[], object] | None = None,
    ):
        """shown_ids: special tokens that the output parser needs, as in `Detokenizer`; deliver: called with the
        events of each step, by default put into `events`; wake: called after `deliver`, once for all answers of
        the step that have the same. Both are called on the engine's thread."""
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer, sequence.request.prompt_ids, shown_ids=shown_ids)
        self.output_parser = output_parser
        self.stops = StopStrings(sequence.request.params.stop)
        self.has_stops = bool(sequence.request.params.stop)
        self.events: queue.SimpleQueue[list[Delivered] | None] = queue.SimpleQueue()
        self.deliver: Deliver = deliver or self.events.put
        self.wake = wake
        self.pending: list[Delivered] = []  # of the current step
        self.token_count = 0
        self.call_count = 0
        self.call_ids: set[str] = set()

    def process(self, event: TokenEvent, device: torch.device) -> bool:
        """Add the events of a token to `pending`, and return whether a stop string ended the answer."""
        reason, deltas = event.finish_reason, []
        if event.token_id is not None:
            self.token_count += 1
            self.sequence.stopwatch.record_token(event.drafted, accepted=event.accepted)
            # An end token is counted and reported, but not part of the text.
            if not event.is_end_token:
                deltas = self.output_parser.push(self.detokenizer.push([event.token_id]))
        if reason:
            deltas += [*self.output_parser.push(self.detokenizer.finish()), *self.output_parser.finish()]
        for delta in deltas:
            if delta.kind is EventType.REASONING:
                self.sequence.stopwatch.mark_reasoning()
                break
        stopped = False
        if self.has_stops or reason:
            deltas, stopped = self.apply_stop_strings(deltas, is_last=reason is not None)
        if stopped:
            reason = FinishReason.STOP
        if len(deltas) <= 1:
            self.pending.append(self.make_event(deltas[0] if deltas else NO_TEXT, event, reason, device))
            return stopped
        self.pending.append(self.make_event(deltas[0], event, None, device))
        for count, delta in enumerate(deltas[1:], 2):
            self.pending.append(self.make_event(delta, None, reason if count == len(deltas) else None, device))
        return stopped

    def make_event(
        self, delta: OutputDelta, event: TokenEvent | None, reason: FinishReason | None, device: torch.device
    ) -> GenerationEvent:
        """Make an event of a delta. event: the token, for its first delta; reason: for the last delta of the
        answer, which carries the metrics."""
        request = self.sequence.request
        return GenerationEvent(
            request.id,
            delta.text,
            (event.token_id,) if event and event.token_id is not None else (),
            (event.logprob,) if event and event.logprob else (),
            event.prompt_logprobs if event else (),
            reason,
            self.sequence.stopwatch.finish(
                len(request.prompt_ids),
                self.sequence.cached_tokens or 0,
                peak_bytes(device),
                self.sequence.disk_tokens,
            )
            if reason
            else None,
            self.sequence.seed if reason else None,
            delta.kind,
            delta.call and self.ensure_call_id(delta.call),
            event.drafted if event else 0,
            event is not None and event.accepted,
            self.stops.matched if reason else None,
            event.step if event else None,
        )

    def ensure_call_id(self, call: ToolCall) -> ToolCall:
        """Return the call with a unique id. A missing or duplicate id becomes nine hexadecimal digits, the length
        that Mistral's templates require, derived from prompt, seed and index so that answers are reproducible."""
        self.call_count += 1
        source = repr((self.sequence.request.prompt_ids, self.sequence.seed, self.call_count))
        if not call.id or call.id in self.call_ids:
            call = dataclasses.replace(call, id=hashlib.sha256(source.encode()).hexdigest()[:9])
        self.call_ids.add(call.id)
        return call

    def apply_stop_strings(self, deltas: list[OutputDelta], *, is_last: bool) -> tuple[list[OutputDelta], bool]:
        """Return the deltas before a stop string in the content, and whether there was one. Stop strings do not
        span reasoning or tool calls."""
        output: list[OutputDelta] = []
        may_end = self.token_count > self.sequence.request.params.min_tokens
        for delta in deltas:
            if delta.kind is not EventType.CONTENT:
                held_back = self.stops.finish()
                output += [*([OutputDelta(EventType.CONTENT, held_back)] if held_back else []), delta]
                continue
            text, stopped = self.stops.push(delta.text, may_end=may_end)
            output += [OutputDelta(EventType.CONTENT, text)] if text else []
            if stopped:
                return output, True
        rest = self.stops.finish() if is_last else ""
        return [*output, *([OutputDelta(EventType.CONTENT, rest)] if rest else [])], False


class Stream(Iterator[GenerationEvent]):
    """Iterator over the events of an answer, the last of which has finish_reason and metrics. Raises errors of the
    request.

    Closing or deleting it, from any thread, cancels the request: iteration ends at once, and its memory is freed
    before the next step.
    """

    def __init__(self, worker: "Worker", output: RequestOutput, owner: object):
        self.worker = worker
        self.output = output
        self.owner = owner  # referenced while the stream is read
        self.unread: deque[Delivered] = deque()  # of the last step taken from the queue
        self.ended = False

    def __next__(self) -> GenerationEvent:
        if not (self.unread or self.ended):
            self.unread.extend(self.output.events.get() or ())
        if self.ended:  # also if another thread has closed it meanwhile
            raise StopIteration
        event = self.unread.popleft()
        if isinstance(event, BaseException):
            self.ended = True
            raise event
        self.ended = event.finish_reason is not None
        return event

    @property
    def has_more(self) -> bool:
        """Whether the next event is there already."""
        return bool(self.unread) or not self.output.events.empty()

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        ended, self.ended = self.ended, True
        self.output.events.put(None)  # wakes the reader
        if not ended and not self.worker.closed:  # as it is at exit, when modules may be unloaded
            with contextlib.suppress(LocalLLMError):  # closed meanwhile, so there is nothing to cancel
                self.worker.post(lambda: self.worker.cancel(self.output.sequence))

    def __del__(self) -> None:
        self.close()


class Worker:
    """Drives the engine on a thread of its own; requests may be submitted from any thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        threads: int,
        shortage: Callable[[], LocalLLMError],
        context: int,
        max_queue: int = MAX_QUEUE,
        on_end: Callable[[], object] = lambda: None,
    ):
        """threads: CPU threads per operation; shortage: returns the error for a step without enough memory;
        context: maximum tokens per sequence; max_queue: number of waiting sequences from which further ones are
        refused;
        on_end: called when the thread ends."""
        self.engine = engine
        self.on_end = on_end
        self.tokenizer = tokenizer
        self.threads = threads
        self.shortage = shortage
        self.context = context
        self.max_queue = max_queue
        self.incoming: deque[Sequence] = deque()  # in the inbox, in this order
        self.outputs: dict[Sequence, RequestOutput] = {}
        self.slot_table = SlotTable()
        self.undelivered: dict[RequestOutput, None] = {}  # those with pending events, in order
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.inbox_lock = threading.Lock()  # so that nothing is put into the inbox after `close`
        self.steps = 0  # engine steps that produced output tokens
        # Shapes and seconds of the last steps, with the delivery of their tokens and all that was done since the
        # step before: their sum is the time in which the engine was not idle.
        self.step_times: deque[tuple[StepShape, float]] = deque(maxlen=MAX_STEPS)
        # Seconds from the arrival of requests until a busy engine has received them, between two steps, less half
        # of the first. A request comes at random in that step, so the median is what it takes besides.
        self.entry_waits: deque[float] = deque(maxlen=MAX_STEPS)
        self.last_step_s = 0.0
        self.recent_steps: deque[tuple[StepShape, float]] = deque(maxlen=RECENT_STEPS)
        self.answer_lens: deque[int] = deque(maxlen=RECENT_ANSWERS)  # in tokens
        self.cancelled = 0
        self.finished: Counter[str] = Counter()  # ended answers by finish reason
        self.closed = False
        self.closed_reason = "the model is closed"
        self.failed = False  # after a failure of the GPU or of another rank
        self.thread = threading.Thread(target=self.run, name="localllm-engine", daemon=True)
        self.thread.start()

    def submit(
        self,
        sequence: Sequence,
        owner: object,
        output_parser: OutputParser,
        shown_ids: Collection[int] = (),
        deliver: Deliver | None = None,
        wake: Callable[[], object] | None = None,
    ) -> Stream:
        """Queue a sequence, and return the stream of its events. owner: referenced by the stream; the other
        arguments are those of `RequestOutput`. Raises Busy if too many sequences wait, LocalLLMError after
        `close`."""
        output = RequestOutput(sequence, self.tokenizer, output_parser, shown_ids, deliver, wake)

        def begin() -> None:
            with self.inbox_lock:
                self.incoming.popleft()
            self.outputs[sequence] = output
            if self.engine.has_unfinished_requests:
                wait_s = time.perf_counter() - sequence.request.arrival
                self.entry_waits.append(wait_s - self.last_step_s / 2)
            self.slot_table.begin(sequence.request, sequence.token_ids)
            for event in self.engine.add_sequence(sequence):
                self.deliver(event)
            self.enforce_context(sequence)  # which may have been reduced since it was prepared

        with self.inbox_lock:
            self.check_open()
            self.check_queue()
            self.incoming.append(sequence)
            self.inbox.put(begin)
        return Stream(self, output, owner)

    @property
    def waiting(self) -> int:
        """Number of sequences that have not started or were preempted."""
        return len(self.incoming) + len(self.engine.scheduler.waiting)

    def check_queue(self) -> None:
        """Raise QueueFull if the queue is full."""
        if (waiting := self.waiting) >= self.max_queue:
            raise QueueFull(f"the queue is full: {waiting} requests are waiting", self.queue_forecast)

    @cached_property
    def queue_forecast(self) -> WaitForecast:
        """When a full queue accepts requests again."""
        from localllm.llm.queue_forecast import QueueForecast  # with the simulator: 8 ms

        return QueueForecast(self.engine, self.incoming, self.recent_steps, self.answer_lens)

    def stats(self) -> EngineStats:
        """Return the engine's statistics, from any thread, without waiting for the engine."""
        engine, scheduler, pool = self.engine, self.engine.scheduler, self.engine.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=self.waiting,
            most_waiting=self.max_queue,
            context=self.context,
            blocks=pool.count,
            block_tokens=pool.block_size,
            used_blocks=pool.count - pool.free_count,
            cached_blocks=len(pool.cached),
            evicted_blocks=pool.evicted_count,
            steps=engine.steps,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            host_tokens=scheduler.host_tokens,
            disk_tokens=scheduler.disk_tokens,
            offloaded_blocks=pool.offloaded_count,
            restored_blocks=pool.restored_count,
            disk=pool.lower.counts if pool.lower else None,
            moves=tier_moves(engine),
            lookups=scheduler.prefix_lookups,
            hits=scheduler.prefix_hits,
            output_tokens=engine.output_tokens,
            draft_tokens=engine.draft_tokens,
            accepted_tokens=engine.accepted_tokens,
            preemptions=scheduler.preemptions,
            cancelled=self.cancelled,
            finished=dict(self.finished),
        )

    def slots(self) -> list[Slot]:
        """Return the state of each request, from any thread, without waiting for the engine."""
        return [make_slot(sequence) for sequence in list(self.outputs)]

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps, and return its result.

        Raises the function's errors, and LocalLLMError after `close`.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(self.translate_error(error))
                if is_engine_failure(error):
                    raise

        self.post(run)
        return future.result()

    def close(self) -> None:
        """End the thread after the current step; unfinished answers fail with an error."""
        with self.inbox_lock:
            self.closed = True
            self.inbox.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def post(self, command: Callable[[], object]) -> None:
        """Queue a command for the engine's thread. Raises LocalLLMError after `close`."""
        with self.inbox_lock:
            self.check_open()
            self.inbox.put(command)

    def check_open(self) -> None:
        if self.closed:
            raise LocalLLMError(self.closed_reason, "load it again")

    def run(self) -> None:
        """Step the engine until the worker is closed: the body of its thread."""
        torch.get_num_threads()  # otherwise the first operation would adopt the number that another thread has set
        torch.set_num_threads(self.threads)
        device, is_open = self.engine.device, True
        ended: float | None = None  # when the step before was delivered, if the engine was not idle since
        with torch.inference_mode(), device_context(device):
            while is_open:
                try:
                    if not self.engine.has_unfinished_requests:
                        ended, self.last_step_s = None, 0.0
                    is_open = self.read_inbox()
                    # New requests are received between two steps, which delays the second.
                    began = time.perf_counter() if ended is None else ended
                    events = self.engine.step() if is_open else []
                    self.steps += any(event.token_id is not None for event in events)
                    for event in events:
                        self.deliver(event)
                    self.flush()
                    ended = time.perf_counter()
                    if self.engine.last_shape is None and self.engine.runs_concurrent_steps:
                        ended = began  # a part of a round of steps in a pipeline, whose time continues
                    if shape := self.engine.last_shape:
                        timed = shape, ended - began
                        self.last_step_s = ended - began
                        self.step_times.append(timed)
                        self.recent_steps.append(timed)
                except Exception as error:
                    ended = None
                    self.fail_all(self.translate_error(error))
                    if is_engine_failure(error):
                        self.stop_after_failure(error)
                        is_open = False
            if not self.failed:
                self.end_all(
                    LocalLLMError("the model was closed while it was answering", "ask again after loading it")
                )
                self.engine.close()
        self.engine.runner.free()
        self.on_end()
        release_cached(device)

    def report_failure(self, error: Exception) -> None:
        """Fail all requests, and close, from any thread: another rank has failed, perhaps between two steps."""

        def fail() -> None:
            raise error

        with contextlib.suppress(LocalLLMError):  # closed already
            self.post(fail)

    def stop_after_failure(self, error: Exception) -> None:
        """Close the worker after a failure that leaves the engine unusable, and fail all requests."""
        with self.inbox_lock:
            self.closed = self.failed = True
            self.closed_reason = engine_failure_error(error).message
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                with contextlib.suppress(Exception):  # `call` passes it to its caller
                    command()
        self.fail_all(engine_failure_error(error))

    def read_inbox(self) -> bool:
        """Run the queued commands, and wait for one if the engine is idle. Return False when closed."""
        with contextlib.suppress(queue.Empty):
            while True:
                idle = not self.engine.has_unfinished_requests and not self.closed
                if idle and self.inbox.empty():
                    end_openmp_threads()  # they would slow down another model
                self.inbox.get(block=idle)()
                self.flush()
        return not self.closed

    def deliver(self, event: TokenEvent) -> None:
        """Make the events of a token for its reader; an error while doing so ends only this answer."""
        output = self.outputs.get(event.sequence)
        if output is None:
            return
        self.undelivered[output] = None
        finish_reason = event.finish_reason
        try:
            if event.error:
                raise event.error
            if output.process(event, self.engine.device):
                finish_reason = FinishReason.STOP
        except Exception as error:
            output.pending.append(error)
            finish_reason = FinishReason.ERROR
        if finish_reason:
            self.finished[finish_reason] += 1
            if finish_reason != FinishReason.ERROR:
                self.answer_lens.append(output.token_count)
            self.abort(event.sequence)

    def flush(self) -> None:
        """Pass the pending events of all answers to their readers, and wake each reader once."""
        if not self.undelivered:
            return
        outputs, self.undelivered = self.undelivered, {}
        for output in outputs:
            events, output.pending = output.pending, []
            output.deliver(events)
        for wake in {output.wake for output in outputs if output.wake}:
            wake()

    def fail(self, output: RequestOutput, error: Exception) -> None:
        """Let an error be the last event of an answer."""
        output.pending.append(error)
        self.undelivered[output] = None
        self.finished[FinishReason.ERROR] += 1

    def reconfigure(self, context: int, rebuild: Callable[[], None]) -> None:
        """Call `rebuild` to resize the engine's caches to a context, on the engine's thread. Running sequences are
        preempted and computed again; those that no longer fit end with ContextOverflow."""
        for event in self.engine.preempt_all():
            self.deliver(event)
        rebuild()
        self.context = context
        for sequence in list(self.outputs):
            self.enforce_context(sequence)

    def enforce_context(self, sequence: Sequence) -> None:
        """Limit a sequence to the context, or end it with ContextOverflow if it is already longer."""
        length, wanted = len(sequence.token_ids), sequence.wants_answer
        if length + wanted <= self.context:
            sequence.max_len = min(sequence.max_len, self.context)
            return
        overflow = ContextOverflow(length, self.context, "shorten the prompt, or use a model with more context")
        self.fail(self.outputs[sequence], overflow)
        self.abort(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Abort a sequence whose stream was closed."""
        self.cancelled += sequence in self.outputs
        self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence from the engine."""
        if self.outputs.pop(sequence, None):
            self.slot_table.end(sequence.request)
            self.engine.cancel(sequence)

    def fail_all(self, error: Exception) -> None:
        """End all answers with an error, and reset the engine, which remains usable."""
        self.end_all(error)
        self.engine.reset()

    def end_all(self, error: Exception) -> None:
        """End all answers with an error."""
        for sequence, output in self.outputs.items():
            self.engine.cancel(sequence)
            self.slot_table.end(sequence.request)
            self.fail(output, error)
        self.outputs.clear()
        self.flush()

    def prefer_throughput(self) -> None:
        """Accept any number of waiting requests, and choose step sizes for throughput."""
        self.max_queue = sys.maxsize
        self.engine.prefer_throughput()

    def translate_error(self, error: Exception) -> Exception:
        """Return the error to report for an exception in a step."""
        if is_out_of_memory(error):
            return self.shortage()
        return engine_failure_error(error) if is_engine_failure(error) else error


def tier_moves(engine: Engine) -> dict[str, TierMove]:
    """Return what moved between the tiers of the KV cache."""
    moves = dict(engine.runner.move_clock.moves)
    return moves | engine.pool.lower.moves if engine.pool.lower else moves


def make_slot(sequence: Sequence) -> Slot:
    """Return the state of a request, for `slots`."""
    watch, state, now = sequence.stopwatch, sequence.state, sequence.stopwatch.clock()
    return Slot(
        id=sequence.request.id,
        age_s=now - watch.arrival,
        prompt_tokens=sequence.prompt_len,
        found=sequence.cached_tokens or 0,
        computed=state.length if state else 0,
        output_tokens=len(watch.token_times),
        blocks=len(state.block_table) if state else 0,
        first_s=now - watch.token_times[0] if watch.token_times else None,
        waiting=state is None,
    )

"""The thread that drives the engine, and what stands between its tokens and a reader: detokenizing, telling
reasoning and tool calls from content, stop strings, the stopwatch, one queue a request, cancelling."""

import contextlib
import dataclasses
import hashlib
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import TypeVar

import torch

from localllm.errors import Busy, ContextOverflow, LocalLLMError
from localllm.hardware.device import device_context, peak_bytes, release_cached
from localllm.metrics import EngineStats, Slot
from localllm.request import EventType, FinishReason, GenerationEvent, ToolCall
from localllm.runtime.device_errors import gpu_failure_error, is_gpu_failure, is_out_of_memory
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.sequence import Sequence
from localllm.text.detokenizer import Detokenizer, StopStrings
from localllm.text.output.reader import OutputDelta, OutputParser
from localllm.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_QUEUE = 512  # sequences
Deliver = Callable[[GenerationEvent | BaseException], object]


class RequestOutput:
    """One request on its way to its reader."""

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        output_parser: OutputParser,
        shown_ids: Collection[int],
        deliver: Deliver | None = None,
    ):
        """`shown_ids` as in `Detokenizer`: what the router must see; deliver: takes each piece, or the error that
        ends
        the answer, on the engine's thread; else they wait in `events`."""
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer, sequence.request.prompt_ids, shown_ids=shown_ids)
        self.output_parser = output_parser
        self.stops = StopStrings(sequence.request.params.stop)
        self.events: queue.SimpleQueue[GenerationEvent | BaseException | None] = queue.SimpleQueue()
        self.deliver = deliver or self.events.put
        self.call_count = 0
        self.call_ids: set[str] = set()  # of calls

    def process(self, event: TokenEvent, device: torch.device) -> bool:
        """Hand on what a step brought. True: a stop string ended the answer."""
        reason, deltas = event.finish_reason, []
        if event.token_id is not None:
            self.sequence.stopwatch.record_token(event.drafted, accepted=event.accepted)
            # A stop token is counted and reported but is not part of the text.
            if not event.is_end_token:
                deltas = self.output_parser.push(self.detokenizer.push([event.token_id]))
        if reason:
            deltas += [*self.output_parser.push(self.detokenizer.finish()), *self.output_parser.finish()]
        if any(delta.kind is EventType.REASONING for delta in deltas):
            self.sequence.stopwatch.mark_reasoning()
        deltas, stopped = self.apply_stop_strings(deltas, is_last=reason is not None)
        if stopped:
            reason = FinishReason.STOP
        deltas = deltas or [OutputDelta(EventType.CONTENT)]
        self.deliver(self.make_event(deltas[0], event, reason if len(deltas) == 1 else None, device))
        for place, delta in enumerate(deltas[1:], 2):
            self.deliver(self.make_event(delta, None, reason if place == len(deltas) else None, device))
        return stopped

    def make_event(
        self, delta: OutputDelta, event: TokenEvent | None, reason: FinishReason | None, device: torch.device
    ) -> GenerationEvent:
        """With the token of `event`, if it is the token's first piece; with measurements, if it is the last."""
        request = self.sequence.request
        return GenerationEvent(
            request.id,
            delta.text,
            (event.token_id,) if event and event.token_id is not None else (),
            (event.logprob,) if event and event.logprob else (),
            event.prompt_logprobs if event else (),
            reason,
            self.sequence.stopwatch.finish(
                len(request.prompt_ids), self.sequence.cached_tokens or 0, peak_bytes(device)
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
        """Nine letters and digits, as Mistral's templates demand, where the model gave no id itself, or one twice:
        the same for the same prompt, seed and place, so that an answer that is given again is the same."""
        self.call_count += 1
        source = repr((self.sequence.request.prompt_ids, self.sequence.seed, self.call_count))
        if not call.id or call.id in self.call_ids:
            call = dataclasses.replace(call, id=hashlib.sha256(source.encode()).hexdigest()[:9])
        self.call_ids.add(call.id)
        return call

    def apply_stop_strings(self, deltas: list[OutputDelta], *, is_last: bool) -> tuple[list[OutputDelta], bool]:
        """What comes before a stop string in the content, and whether there was one. None spans a thought or a
        call."""
        kept: list[OutputDelta] = []
        for delta in deltas:
            if delta.kind is not EventType.CONTENT:
                held = self.stops.finish()
                kept += [*([OutputDelta(EventType.CONTENT, held)] if held else []), delta]
                continue
            text, stopped = self.stops.push(delta.text)
            kept += [OutputDelta(EventType.CONTENT, text)] if text else []
            if stopped:
                return kept, True
        rest = self.stops.finish() if is_last else ""
        return [*kept, *([OutputDelta(EventType.CONTENT, rest)] if rest else [])], False


class Stream(Iterator[GenerationEvent]):
    """The answer, piece by piece; the last piece carries finish_reason and metrics. Raises what went wrong.

    Closing it, from any thread, or letting it go cancels the request: whoever waits for a piece waits no longer,
    and its memory is free before the next step.
    """

    def __init__(self, worker: "Worker", output: RequestOutput, owner: object):
        self.worker = worker
        self.output = output
        self.owner = owner  # kept for as long as somebody reads
        self.ended = False

    def __next__(self) -> GenerationEvent:
        if self.ended:
            raise StopIteration
        event = self.output.events.get()
        if event is None or self.ended:  # closed meanwhile
            raise StopIteration
        if isinstance(event, BaseException):
            self.ended = True
            raise event
        self.ended = event.finish_reason is not None
        return event

    def close(self) -> None:
        ended, self.ended = self.ended, True
        self.output.events.put(None)  # wakes the reader
        if not ended and not self.worker.closed:  # at exit, when modules are gone, it is
            with contextlib.suppress(LocalLLMError):  # closed meanwhile: nothing is left to cancel
                self.worker.post(lambda: self.worker.cancel(self.output.sequence))

    def __del__(self) -> None:
        self.close()


class Worker:
    """Requests may come from any thread; the engine is touched by this one thread only."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        threads: int,
        shortage: Callable[[], LocalLLMError],
        context: int,
        max_queue: int = MAX_QUEUE,
    ):
        """threads: of the CPU, of an operation; shortage: what to tell where a step finds no memory; context: most
        tokens of a sequence; max_queue: where so many sequences wait, a further one is refused."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.threads = threads
        self.shortage = shortage
        self.context = context
        self.max_queue = max_queue
        self.incoming_count = 0  # sequences in the inbox
        self.outputs: dict[Sequence, RequestOutput] = {}
        self.inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.inbox_lock = threading.Lock()  # so that nothing is put into the inbox after the end
        self.steps = 0  # of the engine that brought tokens of answers
        self.cancelled = 0
        self.finished: Counter[str] = Counter()  # answers that ended, by why
        self.closed = False
        self.closed_reason = "the model is closed"
        self.thread = threading.Thread(target=self.run, name="localllm-engine", daemon=True)
        self.thread.start()

    def submit(
        self,
        sequence: Sequence,
        owner: object,
        output_parser: OutputParser,
        shown_ids: Collection[int] = (),
        deliver: Deliver | None = None,
    ) -> Stream:
        """Hand a sequence to the engine at once; the rest as in `Reply`. Raises Busy where too many wait, and
        LocalLLMError after `close`."""
        reply = RequestOutput(sequence, self.tokenizer, output_parser, shown_ids, deliver)

        def begin() -> None:
            with self.inbox_lock:
                self.incoming_count -= 1
            self.outputs[sequence] = reply
            for event in self.engine.add_sequence(sequence):
                self.deliver(event)
            self.enforce_context(sequence)  # there may be less context than when it was prepared

        with self.inbox_lock:
            self.check_open()
            self.check_queue()
            self.incoming_count += 1
            self.inbox.put(begin)
        return Stream(self, reply, owner)

    @property
    def waiting(self) -> int:
        """Sequences that have not begun, or were put back."""
        return self.incoming_count + len(self.engine.scheduler.waiting)

    def check_queue(self) -> None:
        """Raises Busy where too many wait."""
        if (waiting := self.waiting) >= self.max_queue:
            raise Busy(f"{waiting} requests are waiting, which is the most there may be")

    def stats(self) -> EngineStats:
        """From any thread, at no cost to the engine's: it is not waited for."""
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
        """Requests that it has, as they are: from any thread, at no cost to the engine's."""
        return [make_slot(sequence) for sequence in list(self.outputs)]

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps. Raises LocalLLMError after `close`."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(self.translate_error(error))
                if is_gpu_failure(error):
                    raise

        self.post(run)
        return future.result()

    def close(self) -> None:
        """Ends after the step in flight; unfinished answers end with an error."""
        with self.inbox_lock:
            self.closed = True
            self.inbox.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def post(self, command: Callable[[], object]) -> None:
        with self.inbox_lock:
            self.check_open()
            self.inbox.put(command)

    def check_open(self) -> None:
        if self.closed:
            raise LocalLLMError(self.closed_reason, "load it again")

    def run(self) -> None:
        torch.get_num_threads()  # else the first operation would take over what another thread has set
        torch.set_num_threads(self.threads)
        device, going_on = self.engine.device, True
        with torch.inference_mode(), device_context(device):
            while going_on:
                try:
                    going_on = self.read_inbox()
                    events = self.engine.step() if going_on else []
                    self.steps += any(event.token_id is not None for event in events)
                    for event in events:
                        self.deliver(event)
                except Exception as error:
                    self.fail_all(self.translate_error(error))
                    if is_gpu_failure(error):
                        going_on = self.stop_after_failure(error)
        self.fail_all(LocalLLMError("the model was closed while it was answering", "ask again after loading it"))
        self.engine.runner.free()
        release_cached(device)

    def stop_after_failure(self, error: Exception) -> bool:
        """Nothing more can be asked of the engine. What came in meanwhile is told so. Always False."""
        with self.inbox_lock:
            self.closed, self.closed_reason = True, gpu_failure_error(error).message
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                with contextlib.suppress(Exception):  # told to who asked
                    command()
        self.fail_all(gpu_failure_error(error))
        return False

    def read_inbox(self) -> bool:
        """Carry out what came in, waiting if there is nothing else to do. False: closed, and all is done."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get(block=not self.engine.has_unfinished_requests and not self.closed)()
        return not self.closed

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event to its reader; an answer that cannot be told ends alone."""
        reply = self.outputs.get(event.sequence)
        if reply is None:
            return
        ended = event.finish_reason
        try:
            if event.error:
                raise event.error
            if reply.process(event, self.engine.device):
                ended = FinishReason.STOP
        except Exception as error:
            reply.deliver(error)
            ended = FinishReason.ERROR
        if ended:
            self.finished[ended] += 1
            self.abort(event.sequence)

    def reconfigure(self, context: int, rebuild: Callable[[], None]) -> None:
        """On the engine's thread: have `rebuild` make the engine anew for sequences of so many tokens. What runs
        is
        computed again; what has no place any more ends with ContextOverflow."""
        for event in self.engine.preempt_all():
            self.deliver(event)
        rebuild()
        self.context = context
        for sequence in list(self.outputs):
            self.enforce_context(sequence)

    def enforce_context(self, sequence: Sequence) -> None:
        """Hold it to the context, or end it where that is too late."""
        known, wanted = len(sequence.token_ids), sequence.wants_answer
        if known + wanted <= self.context:
            sequence.max_len = min(sequence.max_len, self.context)
            return
        overflow = ContextOverflow(known, self.context, "ask for less, or with a model that has more context")
        self.outputs[sequence].deliver(overflow)
        self.finished[FinishReason.ERROR] += 1
        self.abort(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody reads it any more."""
        self.cancelled += sequence in self.outputs
        self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        if self.outputs.pop(sequence, None):
            self.engine.cancel(sequence)

    def fail_all(self, error: Exception) -> None:
        """Every answer under way ends with `error`; the engine is empty and usable again."""
        for sequence, reply in self.outputs.items():
            self.engine.cancel(sequence)
            reply.deliver(error)
        self.finished[FinishReason.ERROR] += len(self.outputs)
        self.outputs.clear()
        self.engine.reset()

    def prefer_throughput(self) -> None:
        """Let any number of requests wait, and make steps as large as is fastest for all together."""
        self.max_queue = sys.maxsize
        self.engine.prefer_throughput()

    def translate_error(self, error: Exception) -> Exception:
        """What to tell of a step that broke off."""
        if is_out_of_memory(error):
            return self.shortage()
        return gpu_failure_error(error) if is_gpu_failure(error) else error


def make_slot(sequence: Sequence) -> Slot:
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

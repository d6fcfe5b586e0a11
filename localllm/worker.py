"""The thread that drives the engine, and what stands between its tokens and a reader: detokenizing, stop strings,
the stopwatch, one queue a request, cancelling."""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar

import torch

from localllm.device import peak_bytes
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.metrics import Stopwatch
from localllm.request import FinishReason, GenerationEvent, Request
from localllm.runtime.engine import Engine, TokenEvent
from localllm.runtime.sequence import Sequence
from localllm.text.detokenizer import Detokenizer
from localllm.text.stops import StopStrings
from localllm.text.tokenizer import Tokenizer

T = TypeVar("T")


class Reply:
    """One request on its way to its reader."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer):
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer, sequence.request.prompt_ids)
        self.stops = StopStrings(sequence.request.params.stop)
        self.events: queue.SimpleQueue[GenerationEvent | BaseException] = queue.SimpleQueue()

    def push(self, event: TokenEvent, device: torch.device) -> bool:
        """Hand on what a step brought. True: a stop string ended the answer."""
        reason, text, stopped = event.finish_reason, "", False
        if event.token_id is not None:
            self.sequence.stopwatch.token()
            # A stop token is counted and reported but is not part of the text.
            new = "" if reason is FinishReason.STOP else self.detokenizer.push([event.token_id])
            text, stopped = self.stops.push(new)
        if reason and not stopped:
            rest, stopped = self.stops.push(self.detokenizer.finish())
            text += rest if stopped else rest + self.stops.finish()
        if stopped:
            reason = FinishReason.STOP
        request = self.sequence.request
        self.events.put(
            GenerationEvent(
                request.id,
                text,
                () if event.token_id is None else (event.token_id,),
                (event.logprob,) if event.logprob else (),
                event.prompt_logprobs,
                reason,
                self.sequence.stopwatch.stop(
                    len(request.prompt_ids), self.sequence.cached_tokens or 0, peak_bytes(device)
                )
                if reason
                else None,
                self.sequence.seed if reason else None,
            )
        )
        return stopped


class Worker:
    """Requests may come from any thread; the engine is touched by this one thread only."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, threads: int):
        self.engine = engine
        self.tokenizer = tokenizer
        self.threads = threads  # CPU threads of an operation
        self.replies: dict[int, Reply] = {}
        self.inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, name="localllm-engine", daemon=True)
        self.thread.start()

    def stream(
        self, request: Request, seed: int, eos_ids: frozenset[int], limit: int, load_s: float = 0.0
    ) -> Generator[GenerationEvent, None, None]:
        """The answer, piece by piece; the last piece carries finish_reason and metrics.

        Closing the iterator cancels the request: its memory is free before the next step. Raises what went wrong.
        """
        sequence = Sequence(request, seed, eos_ids, limit, Stopwatch(request.arrival, load_s))
        reply = Reply(sequence, self.tokenizer)
        self.inbox.put(lambda: self.submit(reply))
        try:
            while True:
                event = reply.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.finish_reason:
                    return
        finally:
            self.inbox.put(lambda: self.cancel(reply))

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.inbox.put(run)
        return future.result()

    def close(self) -> None:
        """Ends after the step in flight; unfinished answers end with an error."""
        self.inbox.put(None)
        self.thread.join()

    def submit(self, reply: Reply) -> None:
        self.replies[reply.sequence.request.id] = reply
        self.engine.submit(reply.sequence)

    def cancel(self, reply: Reply) -> None:
        if self.replies.pop(reply.sequence.request.id, None):
            self.engine.cancel(reply.sequence)

    def run(self) -> None:
        torch.set_num_threads(self.threads)  # of this thread, and of those that begin after it
        with torch.inference_mode():
            while self.read_inbox():
                try:
                    for event in self.engine.step():
                        self.deliver(event)
                except Exception as error:
                    self.fail(explain(error))
        self.fail(LocalLLMError("the model was closed while it was answering", "ask again after loading it"))

    def read_inbox(self) -> bool:
        """Carry out what came in, waiting if there is nothing else to do. False: close."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get(block=not self.engine.busy)
                if command is None:
                    return False
                command()
        return True

    def deliver(self, event: TokenEvent) -> None:
        reply = self.replies.get(event.sequence.request.id)
        if reply is None:
            return
        stopped = False
        if event.error:
            reply.events.put(event.error)
        else:
            stopped = reply.push(event, self.engine.runner.device)
        if stopped:
            self.engine.cancel(event.sequence)
        if stopped or event.finish_reason:
            del self.replies[event.sequence.request.id]

    def fail(self, error: BaseException) -> None:
        """Every answer under way ends with `error`; the engine is empty and usable again."""
        for reply in self.replies.values():
            self.engine.cancel(reply.sequence)
            reply.events.put(error)
        self.replies.clear()
        self.engine.in_flight = None


def explain(error: Exception) -> Exception:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return DoesNotFit("there is no memory left for this step", "use a smaller --context")
    return error

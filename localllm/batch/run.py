"""Runs a batch: many lines concurrently, with their answers written in input order."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from localllm.api.openai.responses import JsonObject
from localllm.api.parsed_request import ParsedRequest
from localllm.api.tokens import TokenTexts
from localllm.batch.job import OutputStream
from localllm.batch.lines import BatchLine, encode_line
from localllm.batch.summary import BatchCounts
from localllm.errors import DoesNotFit, LocalLLMError, OutputInvalid
from localllm.llm.llm import LLM, collect_completion
from localllm.llm.worker import Delivered, Stream
from localllm.request import Completion, GenerationEvent, Request, SamplingParams
from localllm.text.grammar.result import check_answer

# Limit of lines, or requests, in progress, as a multiple of those that a step computes. A long answer at the head
# delays the output of later ones, but not their computation until the limit is reached.
OPEN_LINES = 8


@dataclass(eq=False)
class OpenLine:
    """A line whose answer has not been written yet."""

    line: BatchLine
    parsed: ParsedRequest | None = None
    requests: list[Request] = field(default_factory=list)
    events: list[list[GenerationEvent]] = field(default_factory=list)  # one list per request
    # Referenced, since dropping them would cancel their requests.
    streams: list[Stream] = field(default_factory=list)
    unfinished_requests: int = 0  # not answered yet
    error: BaseException | None = None
    answer: bytes | None = None


class BatchRunner:
    """Answers lines with one model. Driven by one thread; `run` is called once."""

    def __init__(
        self,
        llm: LLM,
        out: OutputStream,
        counts: BatchCounts,
        *,
        model: str,
        defaults: SamplingParams,
        fingerprint: str,
        show: Callable[[BatchCounts], object],
    ):
        """model: its name in answers; defaults: for parameters that a line omits; show: called after each
        answer.
        """
        self.llm = llm
        self.output = out
        self.counts = counts
        self.model = model
        self.defaults = defaults
        self.fingerprint = fingerprint
        self.on_progress = show
        self.texts = TokenTexts(llm.tokenizer)
        llm.prefer_throughput()
        self.max_open_lines = OPEN_LINES * llm.memory.max_running
        self.open_lines: deque[OpenLine] = deque()
        self.requests_in_flight = 0  # requests
        self.finished: SimpleQueue[OpenLine] = SimpleQueue()

    def run(self, lines: Iterator[BatchLine]) -> None:
        """Raises errors not caused by a line: a device out of memory, a full disk, a failed engine."""
        for line in lines:
            self.submit_line(line)
            while (
                max(len(self.open_lines), self.requests_in_flight) >= self.max_open_lines
                or not self.finished.empty()
            ):
                self.wait_for_line()
        while self.open_lines:
            self.wait_for_line()

    def submit_line(self, line: BatchLine) -> None:
        open_line = OpenLine(line)
        self.open_lines.append(open_line)
        if line.error:
            self.finish_line(open_line, line.invalid_line_object(line.error), ok=False)
            return
        requested_model = line.body.get("model", self.model)
        if requested_model != self.model:
            self.counts.other_model_lines += 1
            self.counts.other_model = self.counts.other_model or str(requested_model)
        try:
            open_line.parsed = line.parse_request(self.model, self.defaults)
            open_line.requests = open_line.parsed.prepare(self.llm)
        except LocalLLMError as error:
            self.finish_line(open_line, line.failure_object(error), ok=False)
            return
        open_line.unfinished_requests = len(open_line.requests)
        open_line.events = [[] for _ in open_line.requests]
        self.requests_in_flight += open_line.unfinished_requests
        for request, events in zip(open_line.requests, open_line.events, strict=True):
            open_line.streams.append(self.llm.submit(request, partial(self.take_events, open_line, events)))

    def take_events(self, open_line: OpenLine, events: list[GenerationEvent], new: list[Delivered]) -> None:
        """Add the new events of a step. Called on the engine's thread."""
        for event in new:
            if isinstance(event, BaseException):
                open_line.error = event
            else:
                events.append(event)
            if isinstance(event, BaseException) or event.finish_reason:
                open_line.unfinished_requests -= 1
                if not open_line.unfinished_requests:
                    self.finished.put(open_line)

    def wait_for_line(self) -> None:
        """Wait until one more line is answered."""
        if self.open_lines[0].answer is None:
            open_line = self.finished.get()
            self.requests_in_flight -= len(open_line.requests)
            if open_line.error:
                self.finish_line(
                    open_line, open_line.line.failure_object(self.line_error(open_line.error)), ok=False
                )
            else:
                self.answer_line(open_line)
        self.write_ready()

    def line_error(self, error: BaseException) -> LocalLLMError:
        """Return an error that concerns one line only; raise one that would affect the next line too."""
        if not isinstance(error, LocalLLMError) or isinstance(error, DoesNotFit):
            raise error
        self.llm.worker.call(lambda: None)  # a failing engine has closed by then
        if self.llm.worker.closed:
            raise error
        return error

    def answer_line(self, open_line: OpenLine) -> None:
        assert open_line.parsed
        completions = [
            collect_completion(*each) for each in zip(open_line.requests, open_line.events, strict=True)
        ]
        self.count_tokens(completions)
        try:
            for request, completion in zip(open_line.requests, completions, strict=True):
                check_answer(request, completion)
        except OutputInvalid as error:
            self.finish_line(open_line, open_line.line.failure_object(error), ok=False)
            return
        self.finish_line(
            open_line,
            open_line.line.success_object(open_line.parsed, completions, self.texts, self.fingerprint),
            ok=True,
        )

    def count_tokens(self, completions: list[Completion]) -> None:
        for completion in completions:
            self.counts.prompt_tokens += completion.metrics.prompt_tokens
            self.counts.cached_tokens += completion.metrics.cached_tokens
            self.counts.answer_tokens += completion.metrics.output_tokens

    def finish_line(self, open_line: OpenLine, answer: JsonObject, *, ok: bool) -> None:
        """Release the line's objects: finished lines are kept only as bytes."""
        open_line.answer = encode_line(answer)
        open_line.requests, open_line.events, open_line.streams = [], [], []
        self.counts.add(ok=ok)
        self.on_progress(self.counts)

    def write_ready(self) -> None:
        """Write the answers at the head, up to the first missing one."""
        ready = []
        while self.open_lines and (answer := self.open_lines[0].answer) is not None:
            ready.append(answer)
            self.open_lines.popleft()
        if ready:
            self.output.write(b"".join(ready))

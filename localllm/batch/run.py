"""A batch: many lines under way at once, their answers written in the order of the input."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from localllm.api.asked import ParsedRequest
from localllm.api.openai.responses import JsonObject
from localllm.api.tokens import TokenTexts
from localllm.batch.lines import BatchLine, encode_line
from localllm.batch.output import OutputStream as Out
from localllm.batch.summary import BatchCounts
from localllm.errors import DoesNotFit, LocalLLMError, OutputInvalid
from localllm.llm.llm import LLM, collect_completion
from localllm.llm.worker import Stream
from localllm.plan.memory import MAX_RUNNING
from localllm.request import Completion, GenerationEvent, Request, SamplingParams
from localllm.text.grammar.result import check_answer

# Lines, or requests, that are open at once. A long answer at the head holds up the writing of those behind it, not
# their computing, until so many wait.
MAX_OPEN_LINES = 8 * MAX_RUNNING


@dataclass(eq=False)
class OpenLine:
    """A line whose answer is not written yet."""

    line: BatchLine
    parsed: ParsedRequest | None = None
    requests: list[Request] = field(default_factory=list)
    events: list[list[GenerationEvent]] = field(default_factory=list)  # of each request
    streams: list[Stream] = field(default_factory=list)  # let go, they would cancel their requests
    unfinished_requests: int = 0  # requests that are not answered
    error: BaseException | None = None
    answer: bytes | None = None


class BatchRunner:
    """Answers lines with one model. One thread drives it; `run` is called once."""

    def __init__(
        self,
        llm: LLM,
        out: Out,
        counts: BatchCounts,
        *,
        model: str,
        defaults: SamplingParams,
        fingerprint: str,
        show: Callable[[BatchCounts], object],
    ):
        """model: as answers name it; defaults: of what a line leaves out; show: is told after each answer."""
        self.llm = llm
        self.output = out
        self.counts = counts
        self.model = model
        self.defaults = defaults
        self.fingerprint = fingerprint
        self.on_progress = show
        self.texts = TokenTexts(llm.tokenizer)
        llm.prefer_throughput()
        self.open_lines: deque[OpenLine] = deque()
        self.requests_in_flight = 0  # requests
        self.finished: SimpleQueue[OpenLine] = SimpleQueue()

    def run(self, lines: Iterator[BatchLine]) -> None:
        """Raises what is no line's own fault: a device without memory, a full disk, an engine that broke."""
        for line in lines:
            self.submit_line(line)
            while (
                max(len(self.open_lines), self.requests_in_flight) >= MAX_OPEN_LINES or not self.finished.empty()
            ):
                self.wait_for_line()
        while self.open_lines:
            self.wait_for_line()

    def submit_line(self, line: BatchLine) -> None:
        opened = OpenLine(line)
        self.open_lines.append(opened)
        if line.error:
            self.finish_line(opened, line.invalid_line_object(line.error), ok=False)
            return
        named = line.body.get("model", self.model)
        if named != self.model:
            self.counts.other_model_lines += 1
            self.counts.other_model = self.counts.other_model or str(named)
        try:
            opened.parsed = line.parse_request(self.model, self.defaults)
            opened.requests = opened.parsed.prepare(self.llm)
        except LocalLLMError as error:
            self.finish_line(opened, line.failure_object(error), ok=False)
            return
        opened.unfinished_requests = len(opened.requests)
        opened.events = [[] for _ in opened.requests]
        self.requests_in_flight += opened.unfinished_requests
        for request, pieces in zip(opened.requests, opened.events, strict=True):
            opened.streams.append(self.llm.submit(request, partial(self.take_event, opened, pieces)))

    def take_event(
        self, opened: OpenLine, pieces: list[GenerationEvent], piece: GenerationEvent | BaseException
    ) -> None:
        """On the engine's thread."""
        if isinstance(piece, BaseException):
            opened.error = piece
        else:
            pieces.append(piece)
        if isinstance(piece, BaseException) or piece.finish_reason:
            opened.unfinished_requests -= 1
            if not opened.unfinished_requests:
                self.finished.put(opened)

    def wait_for_line(self) -> None:
        """Until one more line has its answer."""
        if self.open_lines[0].answer is None:
            opened = self.finished.get()
            self.requests_in_flight -= len(opened.requests)
            if opened.error:
                self.finish_line(opened, opened.line.failure_object(self.line_error(opened.error)), ok=False)
            else:
                self.answer_line(opened)
        self.write_ready()

    def line_error(self, error: BaseException) -> LocalLLMError:
        """The error, if it is of one line alone; raises what would meet the next line, too."""
        if not isinstance(error, LocalLLMError) or isinstance(error, DoesNotFit):
            raise error
        self.llm.worker.call(lambda: None)  # an engine that gives up has said so by then
        if self.llm.worker.closed:
            raise error
        return error

    def answer_line(self, opened: OpenLine) -> None:
        assert opened.parsed
        dones = [collect_completion(*each) for each in zip(opened.requests, opened.events, strict=True)]
        self.count_tokens(dones)
        try:
            for request, done in zip(opened.requests, dones, strict=True):
                check_answer(request, done)
        except OutputInvalid as error:
            self.finish_line(opened, opened.line.failure_object(error), ok=False)
            return
        self.finish_line(
            opened, opened.line.success_object(opened.parsed, dones, self.texts, self.fingerprint), ok=True
        )

    def count_tokens(self, dones: list[Completion]) -> None:
        for done in dones:
            self.counts.prompt_tokens += done.metrics.prompt_tokens
            self.counts.cached_tokens += done.metrics.cached_tokens
            self.counts.answer_tokens += done.metrics.output_tokens

    def finish_line(self, opened: OpenLine, answer: JsonObject, *, ok: bool) -> None:
        """What was held for the line is let go: finished lines wait as bytes."""
        opened.answer = encode_line(answer)
        opened.requests, opened.events, opened.streams = [], [], []
        self.counts.add(ok=ok)
        self.on_progress(self.counts)

    def write_ready(self) -> None:
        """The answers at the head, up to one that is not there."""
        ready = []
        while self.open_lines and (answer := self.open_lines[0].answer) is not None:
            ready.append(answer)
            self.open_lines.popleft()
        if ready:
            self.output.write(b"".join(ready))

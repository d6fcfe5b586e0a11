"""A batch: many lines under way at once, their answers written in the order of the input."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from localllm.api.asked import Asked
from localllm.api.openai.responses import Object
from localllm.api.tokens import TokenTexts
from localllm.batch.lines import Line, encoded
from localllm.batch.output import Stream as Out
from localllm.batch.summary import Counts
from localllm.errors import DoesNotFit, LocalLLMError, OutputInvalid
from localllm.llm import LLM, collect
from localllm.plan.memory import MAX_RUNNING
from localllm.request import Completion, GenerationEvent, Request, SamplingParams
from localllm.text.grammar.result import check_answer
from localllm.worker import Stream

# Lines, or requests, that are open at once. A long answer at the head holds up the writing of those behind it, not
# their computing, until so many wait.
WINDOW = 8 * MAX_RUNNING


@dataclass(eq=False)
class Open:
    """A line whose answer is not written yet."""

    line: Line
    asked: Asked | None = None
    requests: list[Request] = field(default_factory=list)
    pieces: list[list[GenerationEvent]] = field(default_factory=list)  # of each request
    streams: list[Stream] = field(default_factory=list)  # let go, they would cancel their requests
    left: int = 0  # requests that are not answered
    error: BaseException | None = None
    answer: bytes | None = None


class Batch:
    """Answers lines with one model. One thread drives it; `run` is called once."""

    def __init__(
        self,
        llm: LLM,
        out: Out,
        counts: Counts,
        *,
        model: str,
        defaults: SamplingParams,
        fingerprint: str,
        show: Callable[[Counts], object],
    ):
        """model: as answers name it; defaults: of what a line leaves out; show: is told after each answer."""
        self.llm = llm
        self.out = out
        self.counts = counts
        self.model = model
        self.defaults = defaults
        self.fingerprint = fingerprint
        self.show = show
        self.texts = TokenTexts(llm.tokenizer)
        llm.unhurried()
        self.open: deque[Open] = deque()
        self.under_way = 0  # requests
        self.finished: SimpleQueue[Open] = SimpleQueue()

    def run(self, lines: Iterator[Line]) -> None:
        """Raises what is no line's own fault: a device without memory, a full disk, an engine that broke."""
        for line in lines:
            self.begin(line)
            while max(len(self.open), self.under_way) >= WINDOW or not self.finished.empty():
                self.wait()
        while self.open:
            self.wait()

    def begin(self, line: Line) -> None:
        opened = Open(line)
        self.open.append(opened)
        if line.fault:
            self.end(opened, line.faulty(line.fault), ok=False)
            return
        named = line.body.get("model", self.model)
        if named != self.model:
            self.counts.renamed += 1
            self.counts.other = self.counts.other or str(named)
        try:
            opened.asked = line.asked(self.model, self.defaults)
            opened.requests = opened.asked.prepare(self.llm)
        except LocalLLMError as error:
            self.end(opened, line.refused(error), ok=False)
            return
        opened.left = len(opened.requests)
        opened.pieces = [[] for _ in opened.requests]
        self.under_way += opened.left
        for request, pieces in zip(opened.requests, opened.pieces, strict=True):
            opened.streams.append(self.llm.submit(request, partial(self.take, opened, pieces)))

    def take(self, opened: Open, pieces: list[GenerationEvent], piece: GenerationEvent | BaseException) -> None:
        """On the engine's thread."""
        if isinstance(piece, BaseException):
            opened.error = piece
        else:
            pieces.append(piece)
        if isinstance(piece, BaseException) or piece.finish_reason:
            opened.left -= 1
            if not opened.left:
                self.finished.put(opened)

    def wait(self) -> None:
        """Until one more line has its answer."""
        if self.open[0].answer is None:
            opened = self.finished.get()
            self.under_way -= len(opened.requests)
            if opened.error:
                self.end(opened, opened.line.refused(self.own_fault(opened.error)), ok=False)
            else:
                self.complete(opened)
        self.write()

    def own_fault(self, error: BaseException) -> LocalLLMError:
        """The error, if it is of one line alone; raises what would meet the next line, too."""
        if not isinstance(error, LocalLLMError) or isinstance(error, DoesNotFit):
            raise error
        self.llm.worker.call(lambda: None)  # an engine that gives up has said so by then
        if self.llm.worker.closed:
            raise error
        return error

    def complete(self, opened: Open) -> None:
        assert opened.asked
        dones = [collect(*each) for each in zip(opened.requests, opened.pieces, strict=True)]
        self.count(dones)
        try:
            for request, done in zip(opened.requests, dones, strict=True):
                check_answer(request, done)
        except OutputInvalid as error:
            self.end(opened, opened.line.refused(error), ok=False)
            return
        self.end(opened, opened.line.answered(opened.asked, dones, self.texts, self.fingerprint), ok=True)

    def count(self, dones: list[Completion]) -> None:
        for done in dones:
            self.counts.prompt_tokens += done.metrics.prompt_tokens
            self.counts.cached_tokens += done.metrics.cached_tokens
            self.counts.answer_tokens += done.metrics.output_tokens

    def end(self, opened: Open, answer: Object, *, ok: bool) -> None:
        """What was held for the line is let go: finished lines wait as bytes."""
        opened.answer = encoded(answer)
        opened.requests, opened.pieces, opened.streams = [], [], []
        self.counts.add(ok=ok)
        self.show(self.counts)

    def write(self) -> None:
        """The answers at the head, up to one that is not there."""
        ready = []
        while self.open and (answer := self.open[0].answer) is not None:
            ready.append(answer)
            self.open.popleft()
        if ready:
            self.out.write(b"".join(ready))

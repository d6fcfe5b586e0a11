"""A model that plays scripted events, so that a test controls each moment of an answer."""

import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.metrics import Metrics, StepReads
from localllm.request import ChatRequest, EventType, FinishReason, GenerationEvent, Request, SamplingParams
from localllm.tui.app import ChatApp

Step = GenerationEvent | threading.Event | Exception  # an Event is waited for, an Exception raised

METRICS = Metrics(
    prompt_tokens=12,
    cached_tokens=4,
    output_tokens=8,
    queue_s=0.001,
    load_s=0.0,
    prefill_s=0.049,
    ttft_s=0.05,
    itl_s=(0.02,) * 7,
    e2e_s=0.19,
    peak_bytes=300_000_000,
)


def saying(text: str, thoughts: str = "", finish_reason: FinishReason = FinishReason.STOP) -> list[Step]:
    """Events of a complete answer, with one token per word."""
    steps: list[Step] = []
    for kind, whole in ((EventType.REASONING, thoughts), (EventType.CONTENT, text)):
        words = re.findall(r"\s*\S+\s*$|\s*\S+", whole)
        steps += [GenerationEvent(1, word, (number,), kind=kind) for number, word in enumerate(words)]
    return [*steps, GenerationEvent(1, finish_reason=finish_reason, metrics=METRICS, seed=7)]


class ScriptedTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))


class ScriptedAnswer(Iterator[GenerationEvent]):
    """An answer that ends immediately when it is closed, including by another thread."""

    def __init__(self, steps: Iterable[Step]):
        self.steps = iter(steps)
        self.closed = False

    def __next__(self) -> GenerationEvent:
        for step in self.steps:
            if isinstance(step, threading.Event):
                self.wait(step)
            if self.closed:
                break
            if isinstance(step, Exception):
                raise step
            if isinstance(step, GenerationEvent):
                return step
        raise StopIteration

    def wait(self, event: threading.Event) -> None:
        end = time.monotonic() + 60
        while not (self.closed or event.wait(0.005)):
            assert time.monotonic() < end, "nobody let the script go on"

    def close(self) -> None:
        self.closed = True


class ScriptedModel:
    """Returns scripted answers in order, repeating the last one; `asked` records the requests."""

    name = "scripted"
    context = 4096
    max_context = 8192
    device = "cpu"
    dtype = "float32"
    kv_dtype = "float32"
    weight_bytes = 12_000_000
    deterministic = True
    blocks = 256
    block_tokens = 16
    reads = StepReads(weights=12_000_000, per_token=2_048, kept_per_token=2_048, bandwidth=None)
    has_chat_template = True
    tokenizer = ScriptedTokenizer()
    default_params = SamplingParams(temperature=0.7)

    def __init__(self, *answers: Sequence[Step]):
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.params: list[SamplingParams | None] = []
        self.closed = False

    def answer(self, chat: ChatRequest) -> "ScriptedAnswer":
        steps = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(chat.prompt)
        self.params.append(chat.params)
        return ScriptedAnswer(steps)

    def template_arguments(self, given, *, think=None, with_tools=False) -> dict[str, Any]:
        return dict(given) | ({} if think is None else {"enable_thinking": think})

    def prepare(self, chat: ChatRequest) -> Request:
        raise NotImplementedError

    def submit(self, request):
        raise NotImplementedError

    def provenance(self):
        raise NotImplementedError

    def kernels(self):
        raise NotImplementedError

    def measure_rates(self) -> None: ...

    def record(self, metrics, home, note) -> None: ...

    def close(self) -> None:
        self.closed = True


class ScriptedMachine:
    """A machine with one loaded model; `opened` records the requested names."""

    def __init__(self, model):
        self.model = model
        self.opened: list[str] = []

    def offers(self):
        return []

    def open(self, name, watch):
        self.opened.append(name)
        return self.model


def app_with(model, home: Path, system: str | None = None) -> ChatApp:
    """The app as `localllm run` starts it, with this model."""
    return ChatApp(
        ScriptedMachine(model),
        model.name,
        lambda model: Session(model, Chat(model, system=system), home / "chats"),
        home,
    )

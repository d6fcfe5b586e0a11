"""The chat app in the terminal of this process, with endless answers, as `bench/tui.py` measures it.

`python bench/tui_app.py MODEL TURNS HOME`; tokens and seconds of every answer are appended to HOME/rates.
"""

import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import localllm
from localllm.conversation.chat import Chat, Turn
from localllm.conversation.session import Session
from localllm.metrics import Candidate, StepReport
from localllm.request import GenerationEvent
from localllm.tui.app import ChatApp
from tests.tui.scripted import ScriptedAnswer, ScriptedMachine, ScriptedModel, saying

PARAGRAPH = "Sorting is *stable* when equals keep their order, which `sorted` promises and **many** rely on. "
ANSWER = (
    "## A part\n\n" + PARAGRAPH * 3 + "\n\n"
    "- an item with `code` and some words that go on beyond the end of a line of eighty columns, as they do\n"
    * 12
    + "\n```python\n"
    + "def key(word: str) -> int:\n    return len(word)  # the shortest first\n\n\n" * 10
    + "```\n\n| way | new |\n|---|---|\n"
    + "| `sort` | no |\n" * 6
    + "\n"
)
RATE = 200.0  # tokens a second
HOME = Path(sys.argv[3])


def paced_events():
    """Words at RATE, with step reports like an engine's."""
    began = time.perf_counter()
    candidates = tuple(Candidate(word, -1.0 - word, 0.3 / (1 + word)) for word in range(8))
    for number, step in enumerate(itertools.cycle(saying(ANSWER)[:-1])):
        assert isinstance(step, GenerationEvent)
        time.sleep(max(0.0, began + (number + 1) / RATE - time.perf_counter()))
        start, end = number / RATE, (number + 1) / RATE
        report = StepReport(
            start, end, 1, 33 + number, 3 + number // 16, 0, 1, 0, candidates=(candidates,), prompt=32
        )
        yield GenerationEvent(1, step.text, (number % 90 + 33,), step=report)


class EndlessAnswer:
    """One answer after another as a single endless answer, with its tokens counted."""

    has_more = False

    def __init__(self, begin_answer):
        self.begin_answer, self.answer = begin_answer, begin_answer()
        self.began, self.tokens, self.closed = time.perf_counter(), 0, False

    def __iter__(self):
        return self

    def __next__(self):
        while not self.closed:
            event = next(self.answer, None)
            if event is None:
                self.answer = self.begin_answer()
            elif event.metrics is None:
                self.tokens += len(event.token_ids)
                return event
        raise StopIteration

    def close(self):
        if not self.closed:
            self.closed = True
            self.answer.close()
            with (HOME / "rates").open("a") as file:
                file.write(f"{self.tokens} {time.perf_counter() - self.began}\n")


class EndlessScriptedModel(ScriptedModel):
    context = 1 << 20

    def answer(  # pyright: ignore[reportIncompatibleMethodOverride] - it is read and closed in the same way
        self, chat
    ):
        return EndlessAnswer(lambda: ScriptedAnswer(paced_events()))


class EndlessModel:
    """Answers the first question repeatedly."""

    def __init__(self, model):
        self.model, self.prompt = model, None

    def __getattr__(self, name):
        return getattr(self.model, name)

    def answer(self, chat):
        self.prompt = self.prompt or chat.prompt
        return EndlessAnswer(lambda: self.model.answer(dataclasses.replace(chat, prompt=self.prompt)))


def begin(model: Any) -> Session:
    """Resume a conversation with the requested number of turns; 1,000 are 2,000 messages and 1 MB."""
    chat = Chat(model)
    for number in range(int(sys.argv[2])):
        turn = Turn(f"question {number}", chat.current, PARAGRAPH * 5 + ANSWER[400:900], model=model.name)
        chat.current.children.append(turn)
        chat.current.chosen_child = turn
        chat.current = turn
    return Session(model, chat, HOME / "chats", autosave=False)


def open_model(name: str) -> Any:
    """Open `played`, a model by name, or with `free FOLDER` one that computes nothing (`bench/host.py`)."""
    if name == "played":
        return EndlessScriptedModel()
    if name.startswith("free "):
        from bench.host import install_free_runner

        install_free_runner()
    return EndlessModel(localllm.load(name.removeprefix("free ")))


loaded = open_model(sys.argv[1])
ChatApp(ScriptedMachine(loaded), loaded.name, begin, HOME).run()

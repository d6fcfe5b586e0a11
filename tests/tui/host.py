"""An app around one screen, and machines with models."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from textual.app import App
from textual.screen import Screen

from localllm.cli.machine import LOADING_FIELDS, LocalMachine
from localllm.conversation.model import Model
from localllm.tui.load_screen import LoadScreen, LoadTask
from localllm.tui.machine import Cancelled, ModelOffer

NO_FLAGS = {name: None for name in LOADING_FIELDS} | {"force": False, "deterministic": False, "server": None}
OFFER = ModelOffer(
    name="qwen3:4b-q4_k_m",
    about="qwen3:4b as GGUF, about 5 bits a weight",
    parameters="4.02B",
    bytes=2_500_000_000,
    license="apache-2.0",
    is_here=False,
    fits=True,
    needs_bytes=5_200_000_000,
    free_bytes=23_500_000_000,
    tokens_per_s=11.8,
)


def this_machine(**flags: Any) -> LocalMachine:
    """A local machine with these flags of `run`, which ignores running servers."""
    return LocalMachine({**NO_FLAGS, "local": True, "verbose": False, **flags})


def offer(name: str, **fields: Any) -> ModelOffer:
    return replace(OFFER, name=name, **fields)


class Host(App[None]):
    """Shows one screen; `given` contains the results of dismissing it."""

    def __init__(self, screen: Callable[[], Screen[Any]]):
        super().__init__()
        self.make = screen
        self.given: list[Any] = []

    def on_mount(self) -> None:
        self.show()

    def show(self) -> None:
        self.push_screen(self.make(), self.given.append)


def loads(machine: Any, name: str) -> Host:
    return Host(lambda: LoadScreen(machine, name))


class Clock:
    """A clock that advances only on demand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeMachine:
    """A machine that performs the given acts while a model loads, and has these offers."""

    def __init__(
        self, *acts: Callable[[LoadTask], object], offers: Sequence[ModelOffer] = (), model: Model | None = None
    ):
        self.acts = acts
        self.found = offers
        self.model = model
        self.done = threading.Event()
        self.gone_on = threading.Event()

    def offers(self) -> Sequence[ModelOffer]:
        return self.found

    def open(self, name: str, watch: LoadTask) -> Any:
        for act in self.acts:
            act(watch)
        self.done.set()
        while not self.gone_on.wait(0.01):
            if watch.cancelled:
                raise Cancelled
        return self.model

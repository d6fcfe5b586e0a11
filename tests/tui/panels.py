"""A screen with a conversation and its panels, without the rest of the app."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Input, Static

from localllm.conversation.chat import Chat, Turn
from localllm.conversation.session import Session
from localllm.conversation.session_file import SavedSession, write
from localllm.request import SamplingParams
from localllm.tui.help_screen import key_name
from localllm.tui.machine import ModelOffer
from localllm.tui.picker import CommandChosen, ModelChosen, SessionChosen
from localllm.tui.themes import apply_theme, use_ansi_colors
from localllm.tui.turn_screen import PanelScreen
from tests.tui.scripted import ScriptedModel, saying

EVIL = "[bold red]x[/] \x1b]0;title\x07 日本語のとても長い名前😀です"
GB = 10**9
FREE = int(23.5 * GB)
OFFERS = [
    ModelOffer("demo", "tells small stories", "656K", 2_600_000, "MIT", True, True, 12_000_000, FREE, 2000.0),
    ModelOffer(
        "mine", "an edition of your own", "0.6B", int(1.2 * GB), None, True, True, int(2.1 * GB), FREE, 38.2
    ),
    ModelOffer(EVIL, f"about {EVIL}", "7B", 15 * GB, f"licence {EVIL}", False, True, 16 * GB, FREE, 3.1),
    ModelOffer("best", "for this", "4B", 3 * GB, "Apache-2.0", False, True, 5 * GB, FREE, 21.0, recommended=True),
    ModelOffer("giant", "the largest", "70.6B", 141 * GB, "llama3.3", False, False, 143 * GB, FREE, None),
    ModelOffer("riddle", "its header cannot be read", "-", None, None, False, None, None, None, None),
]


class FakeMachine:
    """go: event that releases the offers; `fault` is raised instead of returning them."""

    def __init__(self, fault: Exception | None = None):
        self.go = threading.Event()
        self.go.set()
        self.fault = fault
        self.asked = 0

    def offers(self):
        self.asked += 1
        assert self.go.wait(20)
        if self.fault:
            raise self.fault
        return OFFERS

    def open(self, name, watch):
        raise NotImplementedError


def told(*pairs: tuple[str, str]) -> Turn:
    """Return the last turn of a branch with these questions and answers."""
    at = Turn("", None)
    for question, answer in pairs:
        turn = Turn(question, at, answer, model="scripted")
        at.children.append(turn)
        at.chosen_child = turn
        at = turn
    return at


def keep(folder: Path, day: int, *pairs: tuple[str, str]) -> str:
    """Save a conversation of this day in January 2026; return its id."""
    at, name = told(*pairs), f"202601{day:02}-100000-00000a"
    root = at.path[0].parent
    began = 1_767_261_600.0 + day * 86_400
    write(
        folder / f"{name}.json",
        SavedSession(pairs[0][0], "scripted", began, began, SamplingParams(), root=root, current=at),
    )
    return name


class ConversationScreen(PanelScreen):
    """Conversation screen that records the panels' messages in `heard`."""

    def __init__(self, home: Path, machine: FakeMachine):
        super().__init__()
        self.machine = machine
        model = ScriptedModel(saying("Blue."))
        self.session = Session(model, Chat(model), home / "chats")
        self.panels = Horizontal(Static("what was said", id="conversation"), id="middle")
        self.heard: list[Any] = []

    def compose(self) -> ComposeResult:
        yield self.panels
        yield Input(id="prompt")

    def on_model_chosen(self, chosen: ModelChosen) -> None:
        self.heard.append(("model", chosen.name))

    def on_session_chosen(self, chosen: SessionChosen) -> None:
        self.heard.append(("session", chosen.id))

    def on_command_chosen(self, chosen: CommandChosen) -> None:
        self.heard.append(("command", chosen.line, chosen.is_complete))


class Stage(App[None]):
    """screen: the screen to show; `given` contains the results of dismissing it."""

    CSS = "#conversation { width: 1fr; } #middle { height: 1fr; } #prompt { height: 1; border: none; }"

    def __init__(self, home: Path, screen: Callable[["Stage"], Screen[Any]]):
        super().__init__(ansi_color=use_ansi_colors())
        self.home = home
        self.make = screen
        self.given: list[Any] = []

    def get_key_display(self, binding: Binding) -> str:
        return key_name(super().get_key_display(binding))

    def on_mount(self) -> None:
        apply_theme(self, self.home)
        self.push_screen(self.make(self), self.given.append)


def talk(home: Path, machine: FakeMachine | None = None) -> Stage:
    return Stage(home, lambda stage: ConversationScreen(home, machine or FakeMachine()))


def said(app: App[Any]) -> str:
    """All text on the screen."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in lines)

"""The help screen: all keys of the screen below it and all slash commands, with search.

Keys are read from the bindings themselves; those of Textual's own widgets, which edit text and move in lists, are
left out.
"""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from localllm.conversation.commands import COMMANDS
from localllm.tui.drawing import align_left

PACKAGE_PREFIX = "localllm."
KEY_ABBREVIATIONS = {"pgup": "PgUp", "pgdn": "PgDn"}

NAME_COLUMN_CELLS = 28  # of keys and commands
HelpSection = tuple[str, list[tuple[str, str]]]  # a heading, and rows of names and descriptions


class HelpScreen(Screen[None]):
    AUTO_FOCUS = "Input"
    BINDING_GROUP_TITLE = "Help"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1", "dismiss(None)", "Close"),
        *(
            Binding(key, f"scroll('{how}')", show=False)
            for key, how in (("up", "up"), ("down", "down"), ("pageup", "page_up"), ("pagedown", "page_down"))
        ),
    ]
    DEFAULT_CSS = """
    HelpScreen {
        #title { height: 1; padding: 0 1; text-style: bold; color: $primary; }
        Input, Input:focus {
            height: 1; border: none; padding: 0 1; background: $panel; background-tint: transparent;
        }
        Input > .input--placeholder { color: $text-muted; }
        VerticalScroll { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[HelpSection] = []

    def compose(self) -> ComposeResult:
        yield Static("Keys and commands", id="title", markup=False)
        yield Input(placeholder="type to search, arrows scroll …", select_on_focus=False)
        with VerticalScroll(can_focus=False):
            yield Static(markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        stack = self.app.screen_stack
        self.sections = help_sections(stack[stack.index(self) - 1])
        self.search()

    @on(Input.Changed)
    def search(self) -> None:
        self.query_one(VerticalScroll).scroll_home(animate=False)
        self.draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        words, region = self.query_one(Input).value.casefold().split(), self.query_one(VerticalScroll).size
        if not region.width:
            return  # before the first layout
        page = render_help(self.sections, words, max(region.width - 2, NAME_COLUMN_CELLS + 20))
        self.query_one("VerticalScroll > Static", Static).update(page)

    def action_scroll(self, how: str) -> None:
        getattr(self.query_one(VerticalScroll), f"scroll_{how}")(animate=False)


def help_sections(screen: Screen) -> list[HelpSection]:
    """Return the keys of a screen by the part of it where they apply, then the slash commands."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for key in key_bindings(screen):
        sections.setdefault(key.group, []).append((key.keys, key.meaning))
    commands = list(dict.fromkeys((command.usage, command.help) for command in COMMANDS.values()))
    return [*sections.items(), ("Commands", commands)]


def render_help(sections: Iterable[HelpSection], words: list[str], width: int) -> Content:
    """Return the rows that contain all words, in casefold, below their headings."""
    lines: list[Content] = []
    for heading, rows in sections:
        matches = [row for row in rows if all(word in f"{heading} {row[0]} {row[1]}".casefold() for word in words)]
        if matches:
            lines += [
                Content.styled(heading, "bold $primary"),
                *(_help_line(*row, width) for row in matches),
                Content(""),
            ]
    return Content("\n").join(lines or [Content("no matches")])


def _help_line(name: str, meaning: str, width: int) -> Content:
    """Return the meaning beside the name, or below a long name."""
    indent = " " * NAME_COLUMN_CELLS
    lines = textwrap.wrap(meaning, width - NAME_COLUMN_CELLS) or [""]
    beside = align_left(name, NAME_COLUMN_CELLS) if cell_len(name) < NAME_COLUMN_CELLS else f"{name}\n{indent}"
    return Content.assemble((beside, "bold"), f"\n{indent}".join(lines))


class KeyBinding(NamedTuple):
    """Keys with the same action."""

    keys: str  # as printed on keyboards
    meaning: str
    action: str
    node: DOMNode  # on which the action runs
    group: str  # heading: the part of the screen where the keys apply


def key_bindings(screen: Screen[Any]) -> list[KeyBinding]:
    """Return the bindings of a screen, its widgets and its app, with the keys of an action joined."""
    nodes: list[DOMNode] = [screen, *screen.query("*"), screen.app]
    joined: dict[tuple[str, str, str], KeyBinding] = {}
    for node in nodes:
        for group, binding in _bindings(node):
            name = screen.app.get_key_display(binding)
            key = (group, binding.action, binding.description)
            if key not in joined:
                joined[key] = KeyBinding(name, binding.description, binding.action, node, group)
            elif name not in joined[key].keys.split(", "):
                joined[key] = joined[key]._replace(keys=f"{joined[key].keys}, {name}")
    return list(joined.values())


def _bindings(node: DOMNode) -> Iterator[tuple[str, Binding]]:
    """Yield the described bindings of a node with their heading."""
    for cls in reversed(type(node).__mro__):
        if cls is App:
            palette = Binding(node.app.COMMAND_PALETTE_BINDING, "command_palette", "Command palette")
            bindings = [*Binding.make_bindings(App.BINDINGS), palette]
        elif cls.__module__.startswith(PACKAGE_PREFIX) and "BINDINGS" in vars(cls):
            bindings = Binding.make_bindings(vars(cls)["BINDINGS"])
        else:
            continue
        group = "Everywhere" if isinstance(node, App) else node.BINDING_GROUP_TITLE or ""
        yield from ((group, binding) for binding in bindings if binding.description)


def key_name(shown: str) -> str:
    """Return a key as printed on keyboards: F1, Tab, ^C; letters stay as typed."""
    return shown if len(shown) == 1 else KEY_ABBREVIATIONS.get(shown, shown.title())

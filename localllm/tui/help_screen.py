"""All keys of the screen below and all slash commands, each with what it does; type to search."""

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

# What every key does where one is, read from the bindings themselves. Those of Textual's widgets are left out:
# they edit text and move in lists as everywhere.

PACKAGE_PREFIX = "localllm."
KEY_ABBREVIATIONS = {"pgup": "PgUp", "pgdn": "PgDn"}


class KeyBinding(NamedTuple):
    keys: str  # as people read them
    meaning: str
    action: str
    node: DOMNode  # whose action it is
    group: str  # where it counts


def key_name(shown: str) -> str:
    """As it stands on keyboards, of Textual's name for it: F1, Tab, ^C; letters stay as they are typed."""
    return shown if len(shown) == 1 else KEY_ABBREVIATIONS.get(shown, shown.title())


def key_bindings(screen: Screen[Any]) -> list[KeyBinding]:
    """Of a screen, its widgets and its app, each once; several keys for one action stand together."""
    nodes: list[DOMNode] = [screen, *screen.query("*"), screen.app]
    found: dict[tuple[str, str, str], KeyBinding] = {}
    for node in nodes:
        for place, binding in _bindings(node):
            name = screen.app.get_key_display(binding)
            which = (place, binding.action, binding.description)
            if which not in found:
                found[which] = KeyBinding(name, binding.description, binding.action, node, place)
            elif name not in found[which].keys.split(", "):
                found[which] = found[which]._replace(keys=f"{found[which].keys}, {name}")
    return list(found.values())


def _bindings(node: DOMNode) -> Iterator[tuple[str, Binding]]:
    """With the name of the place where each counts."""
    for kind in reversed(type(node).__mro__):
        if kind is App:
            palette = Binding(node.app.COMMAND_PALETTE_BINDING, "command_palette", "Command palette")
            bindings = [*Binding.make_bindings(App.BINDINGS), palette]
        elif kind.__module__.startswith(PACKAGE_PREFIX) and "BINDINGS" in vars(kind):
            bindings = Binding.make_bindings(vars(kind)["BINDINGS"])
        else:
            continue
        place = "Everywhere" if isinstance(node, App) else node.BINDING_GROUP_TITLE or type(node).__name__
        yield from ((place, binding) for binding in bindings if binding.description)


NAME_COLUMN_CELLS = 28  # cells of the column of keys and commands
HelpSection = tuple[str, list[tuple[str, str]]]


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
            return  # it is not laid out yet
        shown = render_help(self.sections, words, max(region.width - 2, NAME_COLUMN_CELLS + 20))
        self.query_one("VerticalScroll > Static", Static).update(shown)

    def action_scroll(self, how: str) -> None:
        getattr(self.query_one(VerticalScroll), f"scroll_{how}")(animate=False)


def help_sections(screen: Screen) -> list[HelpSection]:
    """Keys by the place where they count, then the commands."""
    found: dict[str, list[tuple[str, str]]] = {}
    for key in key_bindings(screen):
        found.setdefault(key.group, []).append((key.keys, key.meaning))
    commands = list(dict.fromkeys((command.usage, command.help) for command in COMMANDS.values()))
    return [*found.items(), ("Commands", commands)]


def render_help(sections: Iterable[HelpSection], words: list[str], width: int) -> Content:
    """What has all the words, under its headings, in so many cells."""
    lines: list[Content] = []
    for heading, rows in sections:
        kept = [row for row in rows if all(word in f"{heading} {row[0]} {row[1]}".casefold() for word in words)]
        if kept:
            lines += [
                Content.styled(heading, "bold $primary"),
                *(_help_line(*row, width) for row in kept),
                Content(""),
            ]
    return Content("\n").join(lines or [Content("nothing is called that")])


def _help_line(name: str, meaning: str, width: int) -> Content:
    """The meaning beside the name, or below it where that is long."""
    indent = " " * NAME_COLUMN_CELLS
    lines = textwrap.wrap(meaning, width - NAME_COLUMN_CELLS) or [""]
    beside = align_left(name, NAME_COLUMN_CELLS) if cell_len(name) < NAME_COLUMN_CELLS else f"{name}\n{indent}"
    return Content.assemble((beside, "bold"), f"\n{indent}".join(lines))

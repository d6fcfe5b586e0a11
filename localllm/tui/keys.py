"""What every key does where one is, read from the bindings themselves. Those of Textual's widgets are left out:
they edit text and move in lists as everywhere.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import Screen

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

"""`python tools/chat_docs.py` writes the app's key bindings into docs/chat.md; a test fails if they are stale."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from textual.app import App  # noqa: E402
from textual.binding import Binding  # noqa: E402

from localllm.tui.chat_screen import ChatScreen  # noqa: E402 (this tree, installed or not)
from localllm.tui.inspector.panel import Inspector  # noqa: E402
from localllm.tui.inspector.timeline import Timeline  # noqa: E402
from localllm.tui.inspector.tokens import Tokens  # noqa: E402
from localllm.tui.prompt import Prompt  # noqa: E402
from localllm.tui.sessions_screen import SessionsScreen  # noqa: E402
from localllm.tui.settings_panel import SettingsPanel  # noqa: E402
from localllm.tui.top_app import TopApp  # noqa: E402
from localllm.tui.transcript.view import Transcript  # noqa: E402

PAGE = ROOT / "docs" / "chat.md"
SECTION = re.compile(r"(<!-- keys -->\n).*?(<!-- end -->)", re.DOTALL)
WIDGETS = {  # by their description on the page
    "the conversation": ChatScreen,
    "the prompt": Prompt,
    "a turn that is chosen": Transcript,
    "the inspector": Inspector,
    "its timeline": Timeline,
    "its tokens": Tokens,
    "the settings": SettingsPanel,
    "conversations, models": SessionsScreen,
    "`localllm top`": TopApp,
}
KEY_LABELS = {
    **{"left": "←", "right": "→", "up": "↑", "down": "↓", "plus": "+", "equals_sign": "=", "minus": "-"},
    **{"escape": "Esc", "pageup": "Page up", "pagedown": "Page down", "enter": "Enter"},
}


def bindings(widget: type) -> Iterator[Binding]:
    """Yield localllm's own bindings with a description, inherited ones first."""
    for cls in reversed(widget.__mro__):
        if cls.__module__.startswith("localllm.") and "BINDINGS" in vars(cls):
            yield from (b for b in Binding.make_bindings(vars(cls)["BINDINGS"]) if b.description)


def key_label(key: str) -> str:
    """Label of a key for people: Ctrl+R for `ctrl+r`."""
    *modifiers, last = key.split("+")
    capital = last.capitalize() if modifiers or len(last) > 1 else last
    return "+".join([*(name.capitalize() for name in modifiers), KEY_LABELS.get(last, capital)])


def key_table() -> str:
    """Table with a row of keys and their actions for each widget."""
    rows = ["| in | keys |", "|---|---|"]
    palette = Binding(App.COMMAND_PALETTE_BINDING, "command_palette", "Command palette")
    for description, widget in WIDGETS.items():
        actions: dict[str, list[str]] = {}
        for binding in [*bindings(widget), *([palette] if widget is ChatScreen else [])]:
            first, rest = binding.description[:1], binding.description[1:]
            action = binding.description if rest[:1].isupper() else first.lower() + rest  # KV stays KV
            actions.setdefault(action, []).append(f"`{key_label(binding.key)}`")
        cell = "; ".join(f"{' '.join(keys)} {action}" for action, keys in actions.items())
        rows.append(f"| {description} | {cell} |")
    return "\n".join(rows)


def render(page: str) -> str:
    """The page with a current table."""
    return SECTION.sub(lambda m: f"{m[1]}{key_table()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""`python tools/chat_docs.py` writes the keys of the app into docs/chat.md; a test fails when they are stale."""

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
PLACES = {
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
SIGNS = {
    **{"left": "←", "right": "→", "up": "↑", "down": "↓", "plus": "+", "equals_sign": "=", "minus": "-"},
    **{"escape": "Esc", "pageup": "Page up", "pagedown": "Page down", "enter": "Enter"},
}


def bindings(kind: type) -> Iterator[Binding]:
    """Those of ours, of what a class inherits from and its own."""
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("localllm.") and "BINDINGS" in vars(one):
            yield from (b for b in Binding.make_bindings(vars(one)["BINDINGS"]) if b.description)


def spelled(key: str) -> str:
    """As people read it: `ctrl+r` is Ctrl+R."""
    *held, last = key.split("+")
    capital = last.capitalize() if held or len(last) > 1 else last
    return "+".join([*(name.capitalize() for name in held), SIGNS.get(last, capital)])


def keys() -> str:
    """A row for each place, with what keys do there."""
    rows = ["| in | keys |", "|---|---|"]
    palette = Binding(App.COMMAND_PALETTE_BINDING, "command_palette", "Command palette")
    for place, kind in PLACES.items():
        meanings: dict[str, list[str]] = {}
        for binding in [*bindings(kind), *([palette] if kind is ChatScreen else [])]:
            first, rest = binding.description[:1], binding.description[1:]
            meaning = binding.description if rest[:1].isupper() else first.lower() + rest  # KV stays KV
            meanings.setdefault(meaning, []).append(f"`{spelled(binding.key)}`")
        told = "; ".join(f"{' '.join(names)} {meaning}" for meaning, names in meanings.items())
        rows.append(f"| {place} | {told} |")
    return "\n".join(rows)


def render(page: str) -> str:
    """The page with a fresh table."""
    return SECTION.sub(lambda m: f"{m[1]}{keys()}\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

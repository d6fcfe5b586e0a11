"""What the command palette finds: actions with a key, slash commands, models, kept conversations, themes."""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.message import Message
from textual.screen import Screen

from localllm.conversation.commands import COMMANDS
from localllm.conversation.session_file import SessionHeader
from localllm.conversation.sessions import SessionStore
from localllm.tui.drawing import truncate
from localllm.tui.help_screen import key_bindings
from localllm.tui.machine import Machine
from localllm.tui.models_screen import fit_summary
from localllm.tui.picker import CommandChosen, ModelChosen, SessionChosen

MAX_NAME_CELLS = 60  # cells of a name
EXCLUDED_ACTIONS = ("command_palette", "dismiss")  # actions that make no sense from the palette


class PaletteEntry(NamedTuple):
    name: str
    description: str
    run: Callable[[], Any]


class PaletteHost(Protocol):
    """What the palette needs of the screen that it is opened on."""

    machine: Machine

    @property
    def session_store(self) -> SessionStore: ...


class EntryProvider(Provider):
    """Things that are found by their name. Only those of `shown_at_once` stand there before anything is typed."""

    listed_initially = False

    def __init__(self, screen: Screen[Any], *rest: Any):
        super().__init__(screen, *rest)
        self.entries: Sequence[PaletteEntry] = ()

    async def startup(self) -> None:
        self.entries = list(await self.collect())

    async def collect(self) -> Iterable[PaletteEntry]:
        raise NotImplementedError

    @property
    def host(self) -> PaletteHost:
        return cast(PaletteHost, self.screen)

    def post(self, message: Message) -> Callable[[], object]:
        return partial(self.screen.post_message, message)

    async def discover(self) -> Hits:
        for name, meaning, do in self.entries if self.listed_initially else ():
            yield DiscoveryHit(Content(name), do, name, _as_content(meaning))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, meaning, do in self.entries:
            score = max(matcher.match(name), matcher.match(meaning) / 2)
            if score > 0:
                yield Hit(score, Content(name), do, name, _as_content(meaning))


class ActionProvider(EntryProvider):
    listed_initially = True

    async def collect(self) -> Iterable[PaletteEntry]:
        return [
            PaletteEntry(
                key.meaning, f"{key.keys}, {key.group}", partial(self.app.run_action, key.action, key.node)
            )
            for key in key_bindings(self.screen)
            if not key.action.rpartition(".")[2].startswith(EXCLUDED_ACTIONS)
        ]


class CommandProvider(EntryProvider):
    listed_initially = True

    async def collect(self) -> Iterable[PaletteEntry]:
        """One that cannot do without words is begun in the prompt; the others are done at once."""
        commands = {command.usage: command.help for command in COMMANDS.values()}
        return [
            PaletteEntry(usage, help, self.post(CommandChosen(*fixed_part(usage))))
            for usage, help in commands.items()
        ]


class ModelProvider(EntryProvider):
    """They take a moment, for which nobody waits: they are found as soon as they are there."""

    async def collect(self) -> Iterable[PaletteEntry]:
        self.offers_task = asyncio.create_task(asyncio.to_thread(self.fetch_entries))
        return ()

    def fetch_entries(self) -> Sequence[PaletteEntry]:
        try:
            offers = self.host.machine.offers()
        except Exception:  # the screen of models says what is wrong
            return ()
        return [
            PaletteEntry(
                f"model {truncate(o.name, MAX_NAME_CELLS)}", fit_summary(o), self.post(ModelChosen(o.name))
            )
            for o in offers
        ]

    async def search(self, query: str) -> Hits:
        if self.offers_task.done():
            self.entries = self.offers_task.result()
        async for hit in super().search(query):
            yield hit

    async def shutdown(self) -> None:
        self.offers_task.cancel()


class SessionProvider(EntryProvider):
    async def collect(self) -> Iterable[PaletteEntry]:
        kept = await asyncio.to_thread(self.host.session_store.list)
        return [self.entry(one.id, one.title, one.header) for one in kept if one.header]

    def entry(self, id: str, title: str, head: SessionHeader) -> PaletteEntry:
        told = f"conversation with {truncate(head.model, MAX_NAME_CELLS)}"
        return PaletteEntry(truncate(title, MAX_NAME_CELLS), told, self.post(SessionChosen(id)))


class ThemeProvider(EntryProvider):
    async def collect(self) -> Iterable[PaletteEntry]:
        return [self.entry(name) for name in sorted(self.app.available_themes)]

    def entry(self, name: str) -> PaletteEntry:
        return PaletteEntry(f"theme {name}", "colours of the app", lambda: setattr(self.app, "theme", name))


def fixed_part(usage: str) -> tuple[str, bool]:
    """A command as far as it is the same each time, and whether it can do without more: `/load NAME` cannot."""
    usage = usage.split(",")[0]
    fixed = " ".join(itertools.takewhile(lambda word: word[0] != "[" and not word.isupper(), usage.split()))
    return fixed, not re.sub(r"\[[^]]*\]", "", usage.removeprefix(fixed)).strip()


def _as_content(text: str) -> str:
    """Text that the palette takes for markup, unless it is content already."""
    return cast(str, Content(text))

"""Entries of the command palette: actions with a key, slash commands, models, saved conversations, themes."""

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
from localllm.tui.machine import Machine, ModelOffer
from localllm.tui.models_screen import fit_summary
from localllm.tui.picker import CommandChosen, ModelChosen, SessionChosen

MAX_NAME_CELLS = 60
EXCLUDED_ACTIONS = ("command_palette", "dismiss")  # pointless in the palette


class PaletteEntry(NamedTuple):
    """A name to search for, and what choosing it does."""

    name: str
    description: str
    run: Callable[[], Any]


class PaletteHost(Protocol):
    """A screen on which the palette can be opened."""

    machine: Machine

    @property
    def session_store(self) -> SessionStore: ...


class EntryProvider(Provider):
    """Searches entries by name and description. Subclasses collect the entries."""

    listed_initially = False  # whether entries are listed before anything is typed

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
        for name, description, run in self.entries if self.listed_initially else ():
            yield DiscoveryHit(Content(name), run, name, _as_content(description))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, description, run in self.entries:
            score = max(matcher.match(name), matcher.match(description) / 2)
            if score > 0:
                yield Hit(score, Content(name), run, name, _as_content(description))


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
        """Commands that need arguments are put into the prompt, others run immediately."""
        commands = {command.usage: command.help for command in COMMANDS.values()}
        return [
            PaletteEntry(usage, help, self.post(CommandChosen(*fixed_part(usage))))
            for usage, help in commands.items()
        ]


class ModelProvider(EntryProvider):
    """Lists models on a thread, since that takes a moment: they are found once they are listed."""

    async def collect(self) -> Iterable[PaletteEntry]:
        self.offers_task = asyncio.create_task(asyncio.to_thread(self.fetch_entries))
        return ()

    def fetch_entries(self) -> Sequence[PaletteEntry]:
        try:
            offers = self.host.machine.offers()
        except Exception:  # shown by the list of models
            return ()
        return [self.entry(offer) for offer in offers]

    def entry(self, offer: ModelOffer) -> PaletteEntry:
        name = f"model {truncate(offer.name, MAX_NAME_CELLS)}"
        return PaletteEntry(name, fit_summary(offer), self.post(ModelChosen(offer.name)))

    async def search(self, query: str) -> Hits:
        if self.offers_task.done():
            self.entries = self.offers_task.result()
        async for hit in super().search(query):
            yield hit

    async def shutdown(self) -> None:
        self.offers_task.cancel()


class SessionProvider(EntryProvider):
    async def collect(self) -> Iterable[PaletteEntry]:
        summaries = await asyncio.to_thread(self.host.session_store.list)
        return [self.entry(summary.id, summary.header) for summary in summaries if summary.header]

    def entry(self, id: str, header: SessionHeader) -> PaletteEntry:
        description = f"conversation with {truncate(header.model, MAX_NAME_CELLS)}"
        return PaletteEntry(truncate(header.title, MAX_NAME_CELLS), description, self.post(SessionChosen(id)))


class ThemeProvider(EntryProvider):
    async def collect(self) -> Iterable[PaletteEntry]:
        return [self.entry(name) for name in sorted(self.app.available_themes)]

    def entry(self, name: str) -> PaletteEntry:
        return PaletteEntry(f"theme {name}", "colour theme of the app", lambda: setattr(self.app, "theme", name))


def fixed_part(usage: str) -> tuple[str, bool]:
    """Return a command without its arguments, and whether it works without any: `/load NAME` does not."""
    usage = usage.split(",")[0]
    fixed = " ".join(itertools.takewhile(lambda word: word[0] != "[" and not word.isupper(), usage.split()))
    return fixed, not re.sub(r"\[[^]]*\]", "", usage.removeprefix(fixed)).strip()


def _as_content(text: str) -> str:
    """Return text as content, because the palette would parse a string as markup."""
    return cast(str, Content(text))

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
from localllm.conversation.kept import Head
from localllm.conversation.sessions import Sessions
from localllm.tui.cells import cut
from localllm.tui.keys import keys_of
from localllm.tui.machine import Machine
from localllm.tui.models_screen import fit
from localllm.tui.wishes import CommandChosen, ModelChosen, SessionChosen

LONGEST = 60  # cells of a name
NOT_HERE = ("command_palette", "dismiss")  # actions that make no sense from the palette


class Entry(NamedTuple):
    name: str
    meaning: str
    do: Callable[[], Any]


class Held(Protocol):
    """What the palette needs of the screen that it is opened on."""

    machine: Machine

    @property
    def sessions(self) -> Sessions: ...


class Entries(Provider):
    """Things that are found by their name. Only those of `shown_at_once` stand there before anything is typed."""

    shown_at_once = False

    def __init__(self, screen: Screen[Any], *rest: Any):
        super().__init__(screen, *rest)
        self.entries: Sequence[Entry] = ()

    async def startup(self) -> None:
        self.entries = list(await self.collect())

    async def collect(self) -> Iterable[Entry]:
        raise NotImplementedError

    @property
    def held(self) -> Held:
        return cast(Held, self.screen)

    def wish(self, message: Message) -> Callable[[], object]:
        return partial(self.screen.post_message, message)

    async def discover(self) -> Hits:
        for name, meaning, do in self.entries if self.shown_at_once else ():
            yield DiscoveryHit(Content(name), do, name, _plain(meaning))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, meaning, do in self.entries:
            score = max(matcher.match(name), matcher.match(meaning) / 2)
            if score > 0:
                yield Hit(score, Content(name), do, name, _plain(meaning))


class Actions(Entries):
    shown_at_once = True

    async def collect(self) -> Iterable[Entry]:
        return [
            Entry(key.meaning, f"{key.keys}, {key.place}", partial(self.app.run_action, key.action, key.node))
            for key in keys_of(self.screen)
            if not key.action.rpartition(".")[2].startswith(NOT_HERE)
        ]


class Commands(Entries):
    shown_at_once = True

    async def collect(self) -> Iterable[Entry]:
        """One that cannot do without words is begun in the prompt; the others are done at once."""
        commands = {command.usage: command.help for command in COMMANDS.values()}
        return [Entry(usage, help, self.wish(CommandChosen(*begun(usage)))) for usage, help in commands.items()]


class Models(Entries):
    """They take a moment, for which nobody waits: they are found as soon as they are there."""

    async def collect(self) -> Iterable[Entry]:
        self.coming = asyncio.create_task(asyncio.to_thread(self.offered))
        return ()

    def offered(self) -> Sequence[Entry]:
        try:
            offers = self.held.machine.offers()
        except Exception:  # the screen of models says what is wrong
            return ()
        return [Entry(f"model {cut(o.name, LONGEST)}", fit(o), self.wish(ModelChosen(o.name))) for o in offers]

    async def search(self, query: str) -> Hits:
        if self.coming.done():
            self.entries = self.coming.result()
        async for hit in super().search(query):
            yield hit

    async def shutdown(self) -> None:
        self.coming.cancel()


class Conversations(Entries):
    async def collect(self) -> Iterable[Entry]:
        kept = await asyncio.to_thread(self.held.sessions.list)
        return [self.entry(one.id, one.title, one.head) for one in kept if one.head]

    def entry(self, id: str, title: str, head: Head) -> Entry:
        told = f"conversation with {cut(head.model, LONGEST)}"
        return Entry(cut(title, LONGEST), told, self.wish(SessionChosen(id)))


class Themes(Entries):
    async def collect(self) -> Iterable[Entry]:
        return [self.entry(name) for name in sorted(self.app.available_themes)]

    def entry(self, name: str) -> Entry:
        return Entry(f"theme {name}", "colours of the app", lambda: setattr(self.app, "theme", name))


def begun(usage: str) -> tuple[str, bool]:
    """A command as far as it is the same each time, and whether it can do without more: `/load NAME` cannot."""
    usage = usage.split(",")[0]
    fixed = " ".join(itertools.takewhile(lambda word: word[0] != "[" and not word.isupper(), usage.split()))
    return fixed, not re.sub(r"\[[^]]*\]", "", usage.removeprefix(fixed)).strip()


def _plain(text: str) -> str:
    """Text that the palette takes for markup, unless it is content already."""
    return cast(str, Content(text))

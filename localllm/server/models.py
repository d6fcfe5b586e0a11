"""The models of a server: loaded when they are asked for, kept for a while, let go of for others.

A model is known by where it lies (`Loaded.key`), so that several names of one model share one engine. One is
loaded at a time, or given more room, as each takes its measure of the memory that is free; a lease of a model that
is loaded, and has the room, does not wait for that. A model that somebody uses is never let go of, except at the
end of the server.

All on the event loop; what takes time is done in a thread meanwhile. Knows nothing of HTTP.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from localllm.embedder import Embedder
from localllm.errors import Busy, DoesNotFit, LocalLLMError, ModelNotFound, UsageError
from localllm.hub.made import edition_of
from localllm.hub.names import known_as
from localllm.hub.resolve import resolve
from localllm.llm import LLM
from localllm.modelfile.edition import Edition
from localllm.server.events import Events
from localllm.server.lease import Lease, Loaded
from localllm.server.names import source_of
from localllm.server.threads import in_thread

T = TypeVar("T")

KEEP_ALIVE = 300.0  # seconds

Load = Callable[[str, int | None], LLM | Embedder]
"""By name, with a context or as much as fits. Raises LocalLLMError."""


@dataclass(eq=False)
class Loading:
    """A load under way, and how many wait for it: they use the model from its first moment on."""

    name: str
    task: asyncio.Task[Loaded]
    waiting: int = 0


class Models:
    def __init__(
        self,
        load: Load,
        given: Mapping[str, str] | None = None,
        keep_alive: float = KEEP_ALIVE,
        most: int | None = None,
    ):
        """given: names with what each stands for, which may be a path; keep_alive: as of Loaded, for those that no
        request says otherwise of; most: models at a time."""
        self.load = load
        self.given = dict(given or {})
        self.keep_alive = keep_alive
        self.most = most
        self.loaded: dict[str, Loaded] = {}  # by key
        self.loads: dict[str, Loading] = {}  # by key
        self.leaving: set[asyncio.Task[None]] = set()
        self.one_at_a_time = asyncio.Lock()
        self.ending: asyncio.Future[None] | None = None  # done: nobody waits for a load any more
        self.events = Events()
        self.left_behind = False  # at the end, a load that cannot be broken off

    def source_of(self, name: str) -> str:
        """What to load for a name that a client sent. Raises ModelNotFound as `names.source_of`."""
        return source_of(name, self.given)

    def key_of(self, name: str) -> str:
        """Raises as `source_of`."""
        return str(resolve(self.source_of(name)).path.resolve())

    def edition_of(self, name: str) -> Edition | None:
        """What stands before the model that a name means."""
        return None if name in self.given else edition_of(known_as(name))

    def means(self, name: str, loaded: Loaded) -> bool:
        """Does the name still stand for this model, with nothing before it?"""
        with suppress(LocalLLMError):
            return self.find(name) is loaded and self.edition_of(name) is None
        return False

    def edited(self, loaded: Loaded, name: str) -> LLM:
        """What answers to a name of a loaded model. Raises as `Loaded.chatting`."""
        edition = self.edition_of(name)
        return loaded.chatting.edited(edition) if edition else loaded.chatting

    def find(self, name: str) -> Loaded | None:
        """The model, if it is loaded. Raises as `source_of`."""
        return self.loaded.get(self.key_of(name))

    def holds(self, name: str) -> bool:
        """Is it loaded? Raises as `source_of`."""
        return self.find(name) is not None

    async def lease(self, name: str, keep_alive: float | None = None, context: int | None = None) -> Lease:
        """The model, loaded if it was not. Raises ModelNotFound, Busy, and what loading raises.

        keep_alive: from now on, None for no change, 0 for none after this use; context: tokens that it must have
        room for.
        """
        loaded = await self.held(name, context)
        try:
            if keep_alive is not None:
                loaded.keep_alive = keep_alive
            if context is not None and context > loaded.llm.context:
                await self.resize(loaded, context)
            return Lease(self, loaded, name)
        except BaseException:
            self.released(loaded)
            raise

    async def held(self, name: str, context: int | None) -> Loaded:
        """The model with one user more. A load goes on without those who leave: it will soon be asked for."""
        key = self.key_of(name)
        if loaded := self.loaded.get(key):
            loaded.hold()
            return loaded
        self.ending = ending = self.ending or asyncio.get_running_loop().create_future()
        if ending.done():
            raise Busy("the server is ending")
        loading = self.loads.get(key)
        if loading is None:
            task = asyncio.create_task(self.bring(key, name, self.source_of(name), context))
            loading = self.loads[key] = Loading(name, task)
            # Nobody may be left to be told; the log has it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        loading.waiting += 1
        try:
            await asyncio.wait((loading.task, ending), return_when=asyncio.FIRST_COMPLETED)
            if not loading.task.done():
                raise Busy("the server is ending")
            return loading.task.result()
        except BaseException:
            loading.waiting -= 1
            if loading.task.done() and not loading.task.exception():
                self.released(loading.task.result())
            raise

    async def bring(self, key: str, name: str, source: str, context: int | None) -> Loaded:
        try:
            async with self.one_at_a_time:
                await self.make_room(name)
                start = time.perf_counter()
                llm = await self.somehow(partial(self.load, source, context), name)
        except Exception as error:
            self.events.add("failed", name, str(error))
            raise
        finally:
            loading = self.loads.pop(key)
        self.events.add("loaded", name, "asked for", time.perf_counter() - start)
        return self.enter(Loaded(key, name, llm, self.keep_alive), loading.waiting)

    async def make_room(self, name: str) -> None:
        """For one model more than are here. Raises Busy."""
        while self.most is not None and len(self.loaded) >= self.most:
            if not (idle := self.least_recently_used()):
                raise Busy(f"{self.most} models are loaded and all of them answer")
            await self.let_go(idle, f"room for {name}")

    async def somehow(self, work: Callable[[], T], name: str, mine: Loaded | None = None) -> T:
        """What takes memory, at the price of models that nobody uses. mine: what it is for, if that is loaded.
        Raises Busy where there is memory but for models that answer, and what `work` raises."""
        while True:
            if self.leaving:  # whose memory counts as taken until they have gone
                await asyncio.wait(self.leaving)
            try:
                return await in_thread(work)
            except DoesNotFit as error:
                if idle := self.least_recently_used():
                    await self.let_go(idle, f"room for {name}")
                elif any(one is not mine for one in self.loaded.values()):
                    raise Busy(f"{error.message} while other models answer") from error
                elif not self.leaving:
                    raise

    def least_recently_used(self) -> Loaded | None:
        """Of those that nobody uses; one that is kept for ever only where there is no other."""
        idle = [loaded for loaded in self.loaded.values() if not loaded.users]
        return min(idle, key=lambda loaded: (loaded.keep_alive == math.inf, loaded.used_at), default=None)

    async def resize(self, loaded: Loaded, context: int) -> None:
        async with self.one_at_a_time:
            if context > loaded.llm.context:
                await self.somehow(partial(loaded.llm.resize, context), loaded.name, loaded)
                self.events.add("resized", loaded.name, f"context {context} asked for")

    def give(self, llm: LLM | Embedder, source: str) -> None:
        """A model that was loaded at the start, and stays: under its name, whatever it was loaded as. Raises
        UsageError where another has that name, or it is here under another."""
        edition = None if isinstance(llm, Embedder) else llm.edition
        base = llm if isinstance(llm, Embedder) else llm.beneath or llm
        if twice := self.loaded.get(str(resolve(source).path.resolve())):
            raise UsageError(f"{source} is the model {twice.name}", "name it once")
        if llm.name in self.given or any(base.name == loaded.name for loaded in self.loaded.values()):
            raise UsageError(f"two models are called {llm.name}", "give one another name: `localllm cp`")
        if not edition:  # that of an edition goes before each lease
            self.given[llm.name] = source
        self.add(llm.name, base)

    def add(self, name: str, llm: LLM | Embedder, keep_alive: float = math.inf) -> Loaded:
        """One that was loaded elsewhere, under a name that is given or known."""
        self.events.add("loaded", name, "named at the start", llm.load_s)
        return self.enter(Loaded(self.key_of(name), name, llm, keep_alive), 0)

    def enter(self, loaded: Loaded, users: int) -> Loaded:
        self.loaded[loaded.key] = loaded
        loaded.hold(users)
        if not users:
            self.count_down(loaded)
        return loaded

    def released(self, loaded: Loaded) -> None:
        loaded.users -= 1
        loaded.used_at = time.time()
        if not loaded.users:
            self.count_down(loaded)

    def count_down(self, loaded: Loaded) -> None:
        if loaded.keep_alive < math.inf and self.loaded.get(loaded.key) is loaded:
            loop = asyncio.get_running_loop()
            loaded.timer = loop.call_later(loaded.keep_alive, self.expire, loaded)

    def expire(self, loaded: Loaded) -> None:
        if not loaded.users and self.loaded.get(loaded.key) is loaded:
            why = "asked for" if not loaded.keep_alive else f"not used for {loaded.keep_alive:.0f} s"
            self.let_go(loaded, why)

    def stop(self, name: str) -> int:
        """Let go of it now, or when those who use it have ended: how many these are. Raises ModelNotFound where it
        is not loaded."""
        by_name = (
            loaded for loaded in self.loaded.values() if loaded.name == name
        )  # also of what is here no more
        loaded = next(by_name, None) or self.find(name)
        if loaded is None:
            raise ModelNotFound(f"{name} is not loaded", "`localllm ps` shows what is")
        loaded.keep_alive = 0.0
        if not loaded.users:
            self.let_go(loaded, "stopped")
        return loaded.users

    async def drop(self, name: str) -> None:
        """Let go of a model that is about to be removed. Raises Busy where somebody uses it, or waits for it."""
        if self.key_of(name) in self.loads:
            raise Busy(f"{name} is being loaded")
        if loaded := self.find(name):
            if loaded.users:
                raise Busy(f"{name} is answering")
            await self.let_go(loaded, "removed")

    def let_go(self, loaded: Loaded, why: str) -> asyncio.Task[None]:
        """Nobody gets it from now on; its memory is free when the task has ended."""
        del self.loaded[loaded.key]
        if loaded.timer:
            loaded.timer.cancel()
        self.events.add("unloaded", loaded.name, why)
        task = asyncio.create_task(in_thread(loaded.llm.close))
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)
        return task

    def abandon(self) -> None:
        """Whoever waits for a load is told to ask again; loads cannot be broken off."""
        self.ending = self.ending or asyncio.get_running_loop().create_future()
        if not self.ending.done():
            self.ending.set_result(None)

    async def close(self) -> None:
        """Let go of all; answers under way end with an error."""
        self.abandon()
        self.left_behind = bool(self.loads)
        for loaded in list(self.loaded.values()):
            self.let_go(loaded, "the server ends")
        if self.leaving:
            await asyncio.wait(self.leaving)

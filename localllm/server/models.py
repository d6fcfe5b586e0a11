"""The models of a server: loaded when they are asked for, kept for a while, let go of for others.

A model is known by where it lies (`Loaded.key`), so that several names of one model share one engine. One is
loaded at a time, or given more room, as each takes its measure of the memory that is free; a lease of a model that
is loaded, and has the room, does not wait for that. A model that somebody uses is never let go of, except at the
end of the server.

All on the event loop; what takes time is done in a thread meanwhile. Knows nothing of HTTP.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from localllm.errors import Busy, DoesNotFit, LocalLLMError, ModelNotFound, UsageError
from localllm.hub.resolve import ModelRef, resolve_model
from localllm.llm.embedder import Embedder
from localllm.llm.llm import LLM
from localllm.server.inventory import resolve_client_name
from localllm.server.lease import Lease, LoadedModel
from localllm.server.sse import ModelEventLog

# Work in a thread that the end of the process does not wait for, as it may take minutes.

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, whose threads are waited for at the end. Raises what the function raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, fault = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            fault = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=work, name=f"localllm-{getattr(function, '__name__', 'work')}", daemon=True).start()
    return await done


DEFAULT_KEEP_ALIVE_S = 300.0  # seconds

LoadModel = Callable[[ModelRef, int | None], LLM | Embedder]
"""With a context or as much as fits. Raises LocalLLMError."""


@dataclass(eq=False)
class PendingLoad:
    """A load under way, and how many wait for it: they use the model from its first moment on."""

    name: str
    task: asyncio.Task[LoadedModel]
    waiter_count: int = 0


class ModelPool:
    def __init__(
        self,
        loader: LoadModel,
        aliases: Mapping[str, str] | None = None,
        keep_alive: float = DEFAULT_KEEP_ALIVE_S,
        max_models: int | None = None,
    ):
        """aliases: names with what each stands for, which may be a path; keep_alive: as of Loaded, for those that
        no
        request says otherwise of; max_models: models at a time."""
        self.loader = loader
        self.aliases = dict(aliases or {})
        self.keep_alive = keep_alive
        self.max_models = max_models
        self.loaded: dict[str, LoadedModel] = {}  # by key
        self.pending_loads: dict[str, PendingLoad] = {}  # by key
        self.unload_tasks: set[asyncio.Task[None]] = set()
        self.load_lock = asyncio.Lock()
        self.shutdown_future: asyncio.Future[None] | None = None  # done: nobody waits for a load any more
        self.events = ModelEventLog()
        self.has_unfinished_load = False  # at the end, a load that cannot be broken off

    def resolve(self, name: str) -> ModelRef:
        """The model on this machine that a client means. Raises ModelNotFound as `resolve_client_name`."""
        return resolve_client_name(name, self.aliases)

    def is_unedited_name_of(self, name: str, loaded: LoadedModel) -> bool:
        """Whether the name still stands for this model, and for no edition of it."""
        with suppress(LocalLLMError):
            ref = self.resolve(name)
            return self.loaded.get(ref.key) is loaded and ref.edition is None
        return False

    def find(self, name: str) -> LoadedModel | None:
        """The model, if it is loaded. Raises as `resolve`."""
        return self.loaded.get(self.resolve(name).key)

    async def lease(
        self,
        name: str,
        keep_alive: float | None = None,
        context: int | None = None,
        *,
        ref: ModelRef | None = None,
    ) -> Lease:
        """The model, loaded if it was not. Raises ModelNotFound, Busy, and what loading raises.

        keep_alive: from now on, None for no change, 0 for none after this use; context: tokens that it must have
        room for; ref: what the name stands for, where that is known.
        """
        ref = ref or self.resolve(name)
        loaded = await self.acquire(name, ref, context)
        try:
            if keep_alive is not None:
                loaded.keep_alive = keep_alive
            if context is not None and context > loaded.llm.context:
                await self.resize(loaded, context)
            return Lease(self, loaded, name, ref.edition)
        except BaseException:
            self.release(loaded)
            raise

    async def acquire(self, name: str, ref: ModelRef, context: int | None) -> LoadedModel:
        """The model with one user more. A load goes on without those who leave: it will soon be asked for."""
        key = ref.key
        if loaded := self.loaded.get(key):
            loaded.add_users()
            return loaded
        self.shutdown_future = ending = self.shutdown_future or asyncio.get_running_loop().create_future()
        if ending.done():
            raise Busy("the server is ending")
        loading = self.pending_loads.get(key)
        if loading is None:
            task = asyncio.create_task(self.load_model(name, replace(ref, edition=None), context))
            loading = self.pending_loads[key] = PendingLoad(name, task)
            # Nobody may be left to be told; the log has it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        loading.waiter_count += 1
        try:
            await asyncio.wait((loading.task, ending), return_when=asyncio.FIRST_COMPLETED)
            if not loading.task.done():
                raise Busy("the server is ending")
            return loading.task.result()
        except BaseException:
            loading.waiter_count -= 1
            if loading.task.done() and not loading.task.exception():
                self.release(loading.task.result())
            raise

    async def load_model(self, name: str, ref: ModelRef, context: int | None) -> LoadedModel:
        try:
            async with self.load_lock:
                await self.evict_for_limit(name)
                start = time.perf_counter()
                llm = await self.run_evicting(partial(self.loader, ref, context), name)
        except Exception as error:
            self.events.add("failed", name, str(error))
            raise
        finally:
            loading = self.pending_loads.pop(ref.key)
        self.events.add("loaded", name, "asked for", time.perf_counter() - start)
        return self.register(LoadedModel(ref.key, name, llm, self.keep_alive), loading.waiter_count)

    async def evict_for_limit(self, name: str) -> None:
        """For one model more than are here. Raises Busy."""
        while self.max_models is not None and len(self.loaded) >= self.max_models:
            if not (idle := self.least_recently_used()):
                raise Busy(f"{self.max_models} models are loaded and all of them answer")
            await self.unload(idle, f"room for {name}")

    async def run_evicting(self, work: Callable[[], T], name: str, mine: LoadedModel | None = None) -> T:
        """What takes memory, at the price of models that nobody uses. mine: what it is for, if that is loaded.
        Raises Busy where there is memory but for models that answer, and what `work` raises."""
        while True:
            if self.unload_tasks:  # whose memory counts as taken until they have gone
                await asyncio.wait(self.unload_tasks)
            try:
                return await run_in_daemon_thread(work)
            except DoesNotFit as error:
                if idle := self.least_recently_used():
                    await self.unload(idle, f"room for {name}")
                elif any(one is not mine for one in self.loaded.values()):
                    raise Busy(f"{error.message} while other models answer") from error
                elif not self.unload_tasks:
                    raise

    def least_recently_used(self) -> LoadedModel | None:
        """Of those that nobody uses; one that is kept for ever only where there is no other."""
        idle = [loaded for loaded in self.loaded.values() if not loaded.users]
        return min(idle, key=lambda loaded: (loaded.keep_alive == math.inf, loaded.last_used_at), default=None)

    async def resize(self, loaded: LoadedModel, context: int) -> None:
        async with self.load_lock:
            if context > loaded.llm.context:
                await self.run_evicting(partial(loaded.llm.resize, context), loaded.name, loaded)
                self.events.add("resized", loaded.name, f"context {context} asked for")

    def add_preloaded(self, llm: LLM | Embedder, source: str) -> None:
        """A model that was loaded at the start, and stays: under its name, whatever it was loaded as. Raises
        UsageError where another has that name, or it is here under another."""
        edition = None if isinstance(llm, Embedder) else llm.edition
        base = llm if isinstance(llm, Embedder) else llm.with_edition(None)
        key = resolve_model(source).key
        if twice := self.loaded.get(key):
            raise UsageError(f"{source} is the model {twice.name}", "name it once")
        if llm.name in self.aliases or any(base.name == loaded.name for loaded in self.loaded.values()):
            raise UsageError(f"two models are called {llm.name}", "give one another name: `localllm cp`")
        if not edition:  # that of an edition goes before each lease
            self.aliases[llm.name] = source
        self.add(llm.name, base, key=key)

    def add(
        self, name: str, llm: LLM | Embedder, keep_alive: float = math.inf, *, key: str | None = None
    ) -> LoadedModel:
        """Take over a model that was loaded elsewhere. key: as of its ModelRef, where that is known."""
        self.events.add("loaded", name, "named at the start", llm.load_s)
        return self.register(LoadedModel(key or self.resolve(name).key, name, llm, keep_alive), 0)

    def register(self, loaded: LoadedModel, users: int) -> LoadedModel:
        self.loaded[loaded.path_key] = loaded
        loaded.add_users(users)
        if not users:
            self.start_expiry_timer(loaded)
        return loaded

    def release(self, loaded: LoadedModel) -> None:
        loaded.users -= 1
        loaded.last_used_at = time.time()
        if not loaded.users:
            self.start_expiry_timer(loaded)

    def start_expiry_timer(self, loaded: LoadedModel) -> None:
        if loaded.keep_alive < math.inf and self.loaded.get(loaded.path_key) is loaded:
            loop = asyncio.get_running_loop()
            loaded.timer = loop.call_later(loaded.keep_alive, self.expire, loaded)

    def expire(self, loaded: LoadedModel) -> None:
        if not loaded.users and self.loaded.get(loaded.path_key) is loaded:
            why = "asked for" if not loaded.keep_alive else f"not used for {loaded.keep_alive:.0f} s"
            self.unload(loaded, why)

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
            self.unload(loaded, "stopped")
        return loaded.users

    async def unload_for_removal(self, name: str) -> None:
        """Let go of a model that is about to be removed. Raises Busy where somebody uses it, or waits for it."""
        key = self.resolve(name).key
        if key in self.pending_loads:
            raise Busy(f"{name} is being loaded")
        if loaded := self.loaded.get(key):
            if loaded.users:
                raise Busy(f"{name} is answering")
            await self.unload(loaded, "removed")

    def unload(self, loaded: LoadedModel, why: str) -> asyncio.Task[None]:
        """Nobody gets it from now on; its memory is free when the task has ended."""
        del self.loaded[loaded.path_key]
        if loaded.timer:
            loaded.timer.cancel()
        self.events.add("unloaded", loaded.name, why)
        task = asyncio.create_task(run_in_daemon_thread(loaded.llm.close))
        self.unload_tasks.add(task)
        task.add_done_callback(self.unload_tasks.discard)
        return task

    def abort_waiting(self) -> None:
        """Whoever waits for a load is told to ask again; loads cannot be broken off."""
        self.shutdown_future = self.shutdown_future or asyncio.get_running_loop().create_future()
        if not self.shutdown_future.done():
            self.shutdown_future.set_result(None)

    async def close(self) -> None:
        """Let go of all; answers under way end with an error."""
        self.abort_waiting()
        self.has_unfinished_load = bool(self.pending_loads)
        for loaded in list(self.loaded.values()):
            self.unload(loaded, "the server ends")
        if self.unload_tasks:
            await asyncio.wait(self.unload_tasks)

"""The model pool: models are loaded on demand, kept for a while, and evicted when another needs the memory.

A model is identified by its path (`LoadedModel.path_key`), so that several names of it share one engine. Loads and
resizes run one at a time, as each measures the free memory; leasing a loaded model does not wait for them. A model
in use is never evicted, except at shutdown.

Everything runs on the event loop, with blocking work in threads.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from localllm.errors import Busy, DoesNotFit, LocalLLMError, ModelNotFound, UsageError
from localllm.hub.resolve import ModelRef, resolve_model
from localllm.llm.embedder import Embedder
from localllm.llm.garbage import freeze_garbage, unfreeze_garbage
from localllm.llm.llm import LLM
from localllm.server.inventory import resolve_client_name
from localllm.server.lease import Lease, LoadedModel

DEFAULT_KEEP_ALIVE_S = 300.0
MAX_EVENTS = 200
STEPS_TO_RECORD = 512  # that are new, before their durations are stored while the model is idle

P = ParamSpec("P")
T = TypeVar("T")

LoadModel = Callable[[ModelRef, int | None], LLM | Embedder]
"""Loads a model with a context in tokens; None for as much as fits. Raises LocalLLMError."""

ModelEventType = Literal["loaded", "unloaded", "resized", "failed"]

log = logging.getLogger("localllm.models")


@dataclass(frozen=True)
class ModelEvent:
    what: ModelEventType
    model: str
    why: str
    seconds: float | None = None  # duration
    at: float = field(default_factory=time.time)  # seconds since 1970


class ModelEventLog:
    """The newest events of the pool, each of which also gets a line in the log."""

    def __init__(self) -> None:
        self.recent: deque[ModelEvent] = deque(maxlen=MAX_EVENTS)
        self.counts: dict[ModelEventType, int] = {"loaded": 0, "unloaded": 0, "resized": 0, "failed": 0}

    def __iter__(self) -> Iterator[ModelEvent]:
        """Oldest first."""
        return iter(self.recent)

    def add(self, what: ModelEventType, model: str, why: str, seconds: float | None = None) -> None:
        self.recent.append(ModelEvent(what, model, why, seconds))
        self.counts[what] += 1
        duration = {} if seconds is None else {"seconds": round(seconds, 3)}
        log.info(what, extra={"fields": {"event": what, "model": model, "why": why, **duration}})


async def run_in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`, but the end of the process does not wait for the thread, which may take
    minutes."""
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
        result, failure = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=f"localllm-{getattr(function, '__name__', 'work')}", daemon=True).start()
    return await done


@dataclass(eq=False)
class PendingLoad:
    """A load in progress, and how many requests wait for it: these are the model's first users."""

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
        record_steps: Callable[[LLM], object] | None = None,
    ):
        """Create an empty pool.

        aliases: names with the name or path that each stands for; keep_alive: seconds that an unused model stays
        loaded unless a request says otherwise; max_models: limit on loaded models; record_steps: stores how long a
        model's steps took, called in a thread when it has been idle or is unloaded.
        """
        self.loader = loader
        self.aliases = dict(aliases or {})
        self.keep_alive = keep_alive
        self.max_models = max_models
        self.record_steps = record_steps
        self.loaded: dict[str, LoadedModel] = {}  # by key
        self.pending_loads: dict[str, PendingLoad] = {}  # by key
        self.unload_tasks: set[asyncio.Task[None]] = set()
        self.load_lock = asyncio.Lock()
        self.shutdown_future: asyncio.Future[None] | None = (
            None  # done at shutdown: nothing waits for a load any more
        )
        self.events = ModelEventLog()
        self.has_unfinished_load = False  # at shutdown, as a load cannot be cancelled

    def resolve(self, name: str) -> ModelRef:
        """The model on this machine that a client means. Raises ModelNotFound like `resolve_client_name`."""
        return resolve_client_name(name, self.aliases)

    def is_unedited_name_of(self, name: str, loaded: LoadedModel) -> bool:
        """Whether the name resolves to this model, without an edition."""
        with suppress(LocalLLMError):
            ref = self.resolve(name)
            return self.loaded.get(ref.key) is loaded and ref.edition is None
        return False

    def find(self, name: str) -> LoadedModel | None:
        """The model, if it is loaded. Raises ModelNotFound if it is not installed."""
        return self.loaded.get(self.resolve(name).key)

    async def lease(
        self,
        name: str,
        keep_alive: float | None = None,
        context: int | None = None,
        *,
        ref: ModelRef | None = None,
    ) -> Lease:
        """Lease a model, which is loaded first if needed. Raises ModelNotFound, Busy, and LocalLLMError from
        loading.

        keep_alive: the model's from now on, None for no change, 0 to unload it after this use; context: minimum in
        tokens; ref: the resolved name, if known.
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
        """The model with one more user. A load continues if its clients disconnect, as the model will be needed
        soon."""
        key = ref.key
        if loaded := self.loaded.get(key):
            loaded.add_users()
            return loaded
        self.shutdown_future = ending = self.shutdown_future or asyncio.get_running_loop().create_future()
        if ending.done():
            raise Busy("the server is shutting down")
        loading = self.pending_loads.get(key)
        if loading is None:
            task = asyncio.create_task(self.load_model(name, replace(ref, edition=None), context))
            loading = self.pending_loads[key] = PendingLoad(name, task)
            # Retrieve the exception, since no waiter may be left; it is in the log.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        loading.waiter_count += 1
        try:
            await asyncio.wait((loading.task, ending), return_when=asyncio.FIRST_COMPLETED)
            if not loading.task.done():
                raise Busy("the server is shutting down")
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
        self.events.add("loaded", name, "requested", time.perf_counter() - start)
        return self.register(LoadedModel(ref.key, name, llm, self.keep_alive), loading.waiter_count)

    async def evict_for_limit(self, name: str) -> None:
        """Make room for one more model under `max_models`. Raises Busy if all are in use."""
        while self.max_models is not None and len(self.loaded) >= self.max_models:
            if not (idle := self.least_recently_used()):
                raise Busy(f"all {self.max_models} loaded models are in use")
            await self.unload(idle, f"room for {name}")

    async def run_evicting(self, work: Callable[[], T], name: str, mine: LoadedModel | None = None) -> T:
        """Run `work`, which allocates memory, evicting unused models until it fits.

        mine: the model that is resized. Raises Busy if it would fit without models in use, and DoesNotFit.
        """
        while True:
            if self.unload_tasks:  # their memory is not free yet
                await asyncio.wait(self.unload_tasks)
            try:
                return await run_in_daemon_thread(work)
            except DoesNotFit as error:
                if idle := self.least_recently_used():
                    await self.unload(idle, f"room for {name}")
                elif any(loaded is not mine for loaded in self.loaded.values()):
                    raise Busy(f"{error.message} while other models are in use") from error
                elif not self.unload_tasks:
                    raise

    def least_recently_used(self) -> LoadedModel | None:
        """The unused model to evict next. Those that are kept forever come last."""
        idle = [loaded for loaded in self.loaded.values() if not loaded.users]
        return min(idle, key=lambda loaded: (loaded.keep_alive == math.inf, loaded.last_used_at), default=None)

    async def resize(self, loaded: LoadedModel, context: int) -> None:
        async with self.load_lock:
            if context > loaded.llm.context:
                await self.run_evicting(partial(loaded.llm.resize, context), loaded.name, loaded)
                self.events.add("resized", loaded.name, f"context {context} requested")

    def add_preloaded(self, llm: LLM | Embedder, source: str) -> None:
        """Add a model that was loaded at start-up, and stays loaded. Raises UsageError if another model has its
        name, or the same model is loaded under another name."""
        edition = None if isinstance(llm, Embedder) else llm.edition
        base = llm if isinstance(llm, Embedder) else llm.with_edition(None)
        key = resolve_model(source).key
        if same := self.loaded.get(key):
            raise UsageError(f"{source} is the same model as {same.name}", "name it once")
        if llm.name in self.aliases or any(base.name == loaded.name for loaded in self.loaded.values()):
            raise UsageError(f"two models are called {llm.name}", "rename one with `localllm cp`")
        if not edition:  # an edition is applied by each lease
            self.aliases[llm.name] = source
        self.add(llm.name, base, key=key)

    def add(
        self, name: str, llm: LLM | Embedder, keep_alive: float = math.inf, *, key: str | None = None
    ) -> LoadedModel:
        """Add a model that was loaded elsewhere. key: its ModelRef.key, if known."""
        self.events.add("loaded", name, "start-up", llm.load_s)
        return self.register(LoadedModel(key or self.resolve(name).key, name, llm, keep_alive), 0)

    def register(self, loaded: LoadedModel, users: int) -> LoadedModel:
        self.loaded[loaded.path_key] = loaded
        freeze_garbage()
        loaded.add_users(users)
        if not users:
            self.start_expiry_timer(loaded)
        return loaded

    def release(self, loaded: LoadedModel) -> None:
        loaded.users -= 1
        loaded.last_used_at = time.time()
        if not loaded.users:
            self.start_expiry_timer(loaded)
            self.record_steps_of(loaded)

    def record_steps_of(self, loaded: LoadedModel) -> None:
        """Store the durations of an idle model's steps in a thread, if there are many new ones."""
        llm, record = loaded.llm, self.record_steps
        if record and isinstance(llm, LLM) and len(llm.worker.step_times) >= STEPS_TO_RECORD:
            threading.Thread(target=record, args=(llm,), name="localllm-steps", daemon=True).start()

    def start_expiry_timer(self, loaded: LoadedModel) -> None:
        if loaded.keep_alive < math.inf and self.loaded.get(loaded.path_key) is loaded:
            loop = asyncio.get_running_loop()
            loaded.timer = loop.call_later(loaded.keep_alive, self.expire, loaded)

    def expire(self, loaded: LoadedModel) -> None:
        if not loaded.users and self.loaded.get(loaded.path_key) is loaded:
            why = "requested" if not loaded.keep_alive else f"not used for {loaded.keep_alive:.0f} s"
            self.unload(loaded, why)

    def stop(self, name: str) -> int:
        """Unload a model, now or when its running requests have ended; returns their number. Raises ModelNotFound
        if it is not loaded."""
        by_name = (loaded for loaded in self.loaded.values() if loaded.name == name)  # even if uninstalled
        loaded = next(by_name, None) or self.find(name)
        if loaded is None:
            raise ModelNotFound(f"{name} is not loaded", "`localllm ps` lists loaded models")
        loaded.keep_alive = 0.0
        if not loaded.users:
            self.unload(loaded, "stopped")
        return loaded.users

    async def unload_for_removal(self, name: str) -> None:
        """Unload a model before its files are removed. Raises Busy if it is in use or being loaded."""
        key = self.resolve(name).key
        if key in self.pending_loads:
            raise Busy(f"{name} is being loaded")
        if loaded := self.loaded.get(key):
            if loaded.users:
                raise Busy(f"{name} is in use")
            await self.unload(loaded, "removed")

    def unload(self, loaded: LoadedModel, why: str) -> asyncio.Task[None]:
        """Remove a model from the pool. Its memory is free when the returned task is done."""
        del self.loaded[loaded.path_key]
        if loaded.timer:
            loaded.timer.cancel()
        self.events.add("unloaded", loaded.name, why)
        task = asyncio.create_task(run_in_daemon_thread(self.close_model, loaded.llm))
        self.unload_tasks.add(task)
        task.add_done_callback(self.unload_tasks.discard)
        return task

    def close_model(self, llm: LLM | Embedder) -> None:
        if self.record_steps and isinstance(llm, LLM):
            self.record_steps(llm)
        llm.close()
        unfreeze_garbage()  # the model may be part of a cycle
        if self.loaded:
            freeze_garbage()

    def abort_waiting(self) -> None:
        """Refuse requests that wait for a load; the load itself cannot be cancelled."""
        self.shutdown_future = self.shutdown_future or asyncio.get_running_loop().create_future()
        if not self.shutdown_future.done():
            self.shutdown_future.set_result(None)

    async def close(self) -> None:
        """Unload all models; running answers end with an error."""
        self.abort_waiting()
        self.has_unfinished_load = bool(self.pending_loads)
        for loaded in list(self.loaded.values()):
            self.unload(loaded, "shutdown")
        if self.unload_tasks:
            await asyncio.wait(self.unload_tasks)

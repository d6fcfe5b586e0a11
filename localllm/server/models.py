"""The models of a server: loaded when they are asked for, kept for a while, let go of for others.

All on the event loop; what takes time is done in a thread meanwhile. Knows nothing of HTTP.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from localllm.api.tokens import TokenTexts
from localllm.errors import DoesNotFit, LocalLLMError, ModelNotFound
from localllm.hub.names import is_path
from localllm.hub.resolve import resolve
from localllm.llm import LLM

KEEP_ALIVE = 300.0  # seconds
RETRY_S = 5  # after which a client may ask again

Load = Callable[[str, int | None], LLM]
"""By name, with a context or as much as fits. Raises LocalLLMError."""


class Busy(LocalLLMError):
    """No room for this request now; later there may be."""

    http_status = 503
    retry_after = RETRY_S  # seconds


@dataclass(eq=False)
class Loaded:
    """A model in memory, and who uses it."""

    name: str
    llm: LLM
    keep_alive: float  # seconds after its last use; math.inf: for ever
    since: float = field(default_factory=time.time)  # seconds since 1970
    used_at: float = field(default_factory=time.time)
    users: int = 0
    texts: TokenTexts = field(init=False)
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.llm.tokenizer)

    @property
    def expires_at(self) -> float:
        """Seconds since 1970; math.inf: never."""
        return self.used_at + self.keep_alive


class Lease:
    """A model that stays loaded until the end of `with`, or `release`, which may be called again."""

    def __init__(self, models: "Models", loaded: Loaded):
        self.models = models
        self.loaded = loaded
        self.llm = loaded.llm
        self.texts = loaded.texts
        self.released = False
        loaded.users += 1
        if loaded.timer:
            loaded.timer.cancel()

    def kept(self) -> "Lease":
        """One more of the same, for what goes on after this one's end."""
        return Lease(self.models, self.loaded)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.models.released(self.loaded)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Models:
    def __init__(self, load: Load, given: Mapping[str, str] | None = None, keep_alive: float = KEEP_ALIVE):
        """given: names with what each stands for, which may be a path; keep_alive: as of Loaded."""
        self.load = load
        self.given = dict(given or {})
        self.keep_alive = keep_alive
        self.loaded: dict[str, Loaded] = {}
        self.changing = asyncio.Lock()  # one model is loaded or let go of at a time

    def source_of(self, name: str) -> str:
        """What to load for a name that a client sent. Raises ModelNotFound for what is not on this machine: paths
        are for whoever starts the server, and nothing is pulled unasked."""
        if name in self.given:
            return self.given[name]
        resolve(name, paths=False)  # says the same whether or not there is a file of that name
        if is_path(name):
            raise ModelNotFound(f"{name!r} is a path, too", "ask for one of those that the server lists")
        return name

    async def lease(self, name: str, keep_alive: float | None = None, context: int | None = None) -> Lease:
        """The model, loaded if it was not. Raises ModelNotFound, Busy, and what loading raises.

        keep_alive: from now on, None for no change; context: that it must have room for.
        """
        source = self.source_of(name)
        async with self.changing:
            loaded = self.loaded.get(name) or await self.bring(name, source, context)
            if keep_alive is not None:
                loaded.keep_alive = keep_alive
            return Lease(self, loaded)

    async def bring(self, name: str, source: str, context: int | None) -> Loaded:
        """Load it, at the price of models that nobody uses, the one that was not used for longest first."""
        while True:
            try:
                llm = await asyncio.to_thread(self.load, source, context)
            except DoesNotFit as error:
                idle = [loaded for loaded in self.loaded.values() if not loaded.users]
                if idle:
                    await self.let_go(min(idle, key=lambda loaded: loaded.used_at))
                elif self.loaded:
                    raise Busy(f"{error.message} while other models answer", "ask again later") from error
                else:
                    raise
            else:
                return self.add(name, llm)

    def add(self, name: str, llm: LLM) -> Loaded:
        loaded = self.loaded[name] = Loaded(name, llm, self.keep_alive)
        return loaded

    def released(self, loaded: Loaded) -> None:
        loaded.users -= 1
        loaded.used_at = time.time()
        if not loaded.users and loaded.keep_alive < math.inf:
            loop = asyncio.get_running_loop()
            loaded.timer = loop.call_later(loaded.keep_alive, lambda: loop.create_task(self.expire(loaded)))

    async def expire(self, loaded: Loaded) -> None:
        """Let go of a model, unless somebody has begun to use it."""
        async with self.changing:
            if not loaded.users and self.loaded.get(loaded.name) is loaded:
                await self.let_go(loaded)

    async def let_go(self, loaded: Loaded) -> None:
        del self.loaded[loaded.name]
        if loaded.timer:
            loaded.timer.cancel()
        await asyncio.to_thread(loaded.llm.close)

    async def close(self) -> None:
        """Let go of all; answers under way end with an error."""
        async with self.changing:
            for loaded in list(self.loaded.values()):
                await self.let_go(loaded)

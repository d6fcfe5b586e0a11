"""A pull as Ollama's API tells it: a status a line, and how far each file has come."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from localllm.errors import LocalLLMError
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import Order
from localllm.hub.store import SHA256
from localllm.server.threads import in_thread

Object = dict[str, Any]
Work = Callable[["Told"], object]

OFTEN_S = 0.1  # between two lines about one file


class Left(LocalLLMError):
    """Nobody waits for it any more."""

    http_status = 499


class Told:
    """Follows what a thread does, for a reader on the event loop. `Show` of a pull."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: asyncio.Queue[Object | None] = asyncio.Queue()
        self.left = threading.Event()
        self.lock = threading.Lock()
        self.come: dict[str, int] = {}  # bytes, by digest
        self.told_at: dict[str, float] = {}

    def tell(self, status: str, **more: Any) -> None:
        """Raises Left where nobody listens."""
        if self.left.is_set():
            raise Left("nobody waits for it any more")
        self.put({"status": status, **more})

    def put(self, told: Object | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.lines.put_nowait, told)

    def begin(self, order: Order) -> None:
        self.come = dict(order.here)
        for file in order.files:
            self.tell_of(file)

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.come[file.digest] = self.come.get(file.digest, 0) + count
            now = time.monotonic()
            due = now - self.told_at.get(file.digest, 0.0) >= OFTEN_S
            if due:
                self.told_at[file.digest] = now
        if self.left.is_set():
            raise Left("nobody waits for it any more")
        if due:
            self.tell_of(file)

    def finish(self, file: RemoteFile) -> None:
        self.come[file.digest] = file.size
        self.tell_of(file)

    def say(self, text: str) -> None:
        self.tell(text)

    def tell_of(self, file: RemoteFile) -> None:
        kind = "sha256" if SHA256.fullmatch(file.digest) else "sha1"
        completed = min(self.come.get(file.digest, 0), file.size)
        self.tell(
            f"pulling {file.digest[:12]}", digest=f"{kind}:{file.digest}", total=file.size, completed=completed
        )


async def told(work: Work) -> AsyncGenerator[Object]:
    """What a thread tells, as it does; at last the error that ended it is raised. Where the reader leaves, `work`
    hears of it the next time that it says something, and is waited for."""
    told = Told()

    def run() -> None:
        try:
            work(told)
        finally:
            told.put(None)

    running = asyncio.ensure_future(in_thread(run))  # for minutes: prompts are prepared by those of the loop
    try:
        while (line := await told.lines.get()) is not None:
            yield line
        await running
    finally:
        told.left.set()
        if not running.done():
            with suppress(LocalLLMError):
                await asyncio.shield(running)

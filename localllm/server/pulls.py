"""A pull as Ollama's API tells it: a status a line, and how far each file has come."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from localllm.errors import ClientLeft, LocalLLMError
from localllm.hub.listing import RemoteFile
from localllm.hub.pull import PullPlan
from localllm.hub.store import SHA256
from localllm.server.threads import run_in_daemon_thread

JsonObject = dict[str, Any]
BackgroundWork = Callable[["ProgressReporter"], object]

PROGRESS_INTERVAL_S = 0.1  # between two lines about one file


class ProgressReporter:
    """Follows what a thread does, for a reader on the event loop. `Show` of a pull."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        self.is_abandoned = threading.Event()
        self.lock = threading.Lock()
        self.received_bytes: dict[str, int] = {}  # bytes, by digest
        self.reported_at: dict[str, float] = {}

    def report(self, status: str, **more: Any) -> None:
        """Raises Left where nobody listens."""
        if self.is_abandoned.is_set():
            raise ClientLeft("nobody waits for it any more")
        self.put_line({"status": status, **more})

    def put_line(self, line: JsonObject | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.lines.put_nowait, line)

    def begin(self, order: PullPlan) -> None:
        self.received_bytes = dict(order.cached_bytes)
        for file in order.files:
            self.report_file(file)

    def advance(self, file: RemoteFile, count: int) -> None:
        with self.lock:
            self.received_bytes[file.digest] = self.received_bytes.get(file.digest, 0) + count
            now = time.monotonic()
            due = now - self.reported_at.get(file.digest, 0.0) >= PROGRESS_INTERVAL_S
            if due:
                self.reported_at[file.digest] = now
        if self.is_abandoned.is_set():
            raise ClientLeft("nobody waits for it any more")
        if due:
            self.report_file(file)

    def finish(self, file: RemoteFile) -> None:
        self.received_bytes[file.digest] = file.size
        self.report_file(file)

    def say(self, text: str) -> None:
        self.report(text)

    def report_file(self, file: RemoteFile) -> None:
        kind = "sha256" if SHA256.fullmatch(file.digest) else "sha1"
        completed = min(self.received_bytes.get(file.digest, 0), file.size)
        self.report(
            f"pulling {file.digest[:12]}", digest=f"{kind}:{file.digest}", total=file.size, completed=completed
        )


async def progress_lines(work: BackgroundWork) -> AsyncGenerator[JsonObject]:
    """What a thread tells, as it does; at last the error that ended it is raised. Where the reader leaves, `work`
    hears of it the next time that it says something, and is waited for."""
    told = ProgressReporter()

    def run() -> None:
        try:
            work(told)
        finally:
            told.put_line(None)

    running = asyncio.ensure_future(
        run_in_daemon_thread(run)
    )  # for minutes: prompts are prepared by those of the loop
    try:
        while (line := await told.lines.get()) is not None:
            yield line
        await running
    finally:
        told.is_abandoned.set()
        if not running.done():
            with suppress(LocalLLMError):
                await asyncio.shield(running)

"""Tests of the terminal UI, which are coroutines that wait for expected screen contents."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual._context import active_app
from textual.pilot import Pilot

import localllm
from localllm import LLM
from localllm.tui.app import ChatApp
from localllm.tui.chat_screen import ChatScreen


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Hide the developer's chats, history, theme and colours."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TEXTUAL_THEME", raising=False)


@pytest.fixture(scope="session", autouse=True)
def keys_take_no_time() -> Iterator[None]:
    """Go on when the app has handled a key and drawn what follows. Textual's pilot waits twice until the process
    is idle: for 40 ms at least, and for two seconds while a model computes.
    """

    async def handled(min_sleep: float = 0, max_sleep: float = 1) -> None:
        loop: Any = asyncio.get_running_loop()
        end = time.monotonic() + max_sleep
        for _ in range(2):  # what is called after a refresh may need another one
            empty = 0
            while empty < 3 and time.monotonic() < end:  # as each may make others ready
                await asyncio.sleep(0)
                empty = 0 if loop._ready else empty + 1
            active_app.get().screen._on_timer_update()  # draws, 60 times a second otherwise

    with pytest.MonkeyPatch.context() as patch:
        for module in (textual.app, textual.pilot):
            patch.setattr(module, "wait_for_idle", handled)
        yield


class SharedModel:
    """A model that other tests use, too, so that closing it does nothing."""

    def __init__(self, model: LLM):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def close(self) -> None: ...


@pytest.fixture(scope="session")
def demo() -> Iterator[SharedModel]:
    """The bundled model."""
    with localllm.load("demo") as loaded:
        yield SharedModel(loaded)


@pytest.fixture
def until():
    """Wait until a condition is true while the app runs."""

    async def wait(pilot, condition: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "what the test waits for does not come true"
            await pilot.pause(0.01)

    return wait


@pytest.fixture
def opened(until):
    """`async with opened(app) as pilot`: the app with its model ready and the cursor in the prompt."""

    @asynccontextmanager
    async def start(app: ChatApp, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot]:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: isinstance(app.screen, ChatScreen) and app.focused)
            yield pilot

    return start

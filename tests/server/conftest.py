"""Servers of real models on loopback in this process, so that tests can inspect their engines."""

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import uvicorn.server

import localllm
from localllm import LLM
from localllm.server.access import AccessPolicy
from localllm.server.app import create_app
from localllm.server.guard import ConnectionLimits
from localllm.server.models import ModelPool
from localllm.server.prometheus import TokenPrice
from localllm.server.serve import Server, bind
from localllm.server.slots import SlotFiles
from tests.shared import shared

if TYPE_CHECKING:
    from playwright.sync_api import Browser  # takes 0.3 s to import, and few tests need it

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # until it ends, this thread has a running event loop
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def refuse_to_load(name: str, context: int | None) -> LLM:
    raise AssertionError(f"{name} was to be loaded")


@contextmanager
def answering(
    models: ModelPool,
    end: Callable[[], Awaitable[None]],
    access: AccessPolicy = AccessPolicy(),  # noqa: B008 - frozen, as the next
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    *,
    with_prompts: bool = False,
    strict: bool = False,
    slot_files: SlotFiles | None = None,
    token_price: TokenPrice | None = None,
) -> Iterator[str]:
    """Yield the URL of a server with these models; end: as of `Server`."""
    ready, heard = threading.Event(), list[str]()

    def say(text: str) -> None:
        heard.append(text)
        ready.set()

    async def close() -> None:
        await app.state.simulations.close()
        await end()

    with bind("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patch:
        looks_often = {"sleep": lambda seconds: asyncio.sleep(seconds / 10)}  # for its end: ten times a second
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | looks_often))
        app = create_app(
            models,
            access,
            limits,
            log_prompts=with_prompts,
            strict=strict,
            slot_files=slot_files,
            token_price=token_price,
        )
        server = Server(app, listener, say, close, limits=limits, tls=access.tls)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(60)
            yield heard[0].removeprefix("listening on ")
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def serving(
    llm: LLM,
    access: AccessPolicy = AccessPolicy(),  # noqa: B008
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
    *,
    with_prompts: bool = False,
    strict: bool = False,
    slot_files: SlotFiles | None = None,
    token_price: TokenPrice | None = None,
) -> Iterator[str]:
    """Yield the URL of a server with `llm`."""
    models = ModelPool(refuse_to_load)
    models.aliases[llm.name] = str(llm.path)
    loaded = models.add(llm.name, llm)

    async def keep() -> None:
        """Check that no lease is left, and keep the model loaded for other tests."""
        assert not loaded.users, "a lease was not given back"

    options = {"with_prompts": with_prompts, "strict": strict, "slot_files": slot_files}
    with answering(models, keep, access, limits, token_price=token_price, **options) as url:
        yield url


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    with localllm.load("demo") as llm:
        yield llm


@pytest.fixture(scope="session")
def stories() -> Iterator[LLM]:
    with localllm.load(shared("stories260K")) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_url(demo: LLM) -> Iterator[str]:
    with serving(demo) as url:
        yield url


@pytest.fixture(scope="session")
def stories_url(stories: LLM) -> Iterator[str]:
    with serving(stories) as url:
        yield url


@contextmanager
def running() -> Iterator[str]:
    """URL of a server that loads models on request."""
    models = ModelPool(lambda source, context: localllm.load(source, context=context))
    with answering(models, models.close) as url:
        yield url

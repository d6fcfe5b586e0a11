"""Servers of real models on loopback, in this process: their engines can be looked into."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import localllm
from localllm import LLM
from localllm.server.app import create_app
from localllm.server.serve import Server, bind
from localllm.server.served import Served
from tests.shared import shared


@contextmanager
def serving(llm: LLM) -> Iterator[str]:
    """The address of a server of `llm`."""
    ready, heard = threading.Event(), list[str]()

    def say(text: str) -> None:
        heard.append(text)
        ready.set()

    with bind("127.0.0.1", 0) as listener:
        server = Server(create_app(Served(llm)), listener, say)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(10)
            yield heard[0].removeprefix("listening on ")
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


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

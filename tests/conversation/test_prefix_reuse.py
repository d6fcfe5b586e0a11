"""Conversations with the bundled model compute shared prefixes once."""

import dataclasses

import pytest

import localllm
from localllm.conversation import session_file
from localllm.conversation.chat import Chat
from localllm.conversation.session_file import SavedSession
from localllm.request import SamplingParams
from localllm.settings import DiskCache, Settings

BLOCK = 16  # tokens: what is shared is found in whole blocks


@pytest.fixture(scope="module")
def llm():
    with localllm.load("demo", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def chat(llm):
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=24))
    for question in ("Tell me a story about a fox.", "What did she do then?", "And how does it end?"):
        list(chat.ask(question))
    return chat


def test_a_branch_computes_only_its_own_tokens(chat):
    before = chat.turns[1].metrics
    shared = before.prompt_tokens + before.output_tokens
    for branch in (chat.edit(chat.current, "Who was there?"), chat.regenerate(chat.current)):
        list(branch)
        assert chat.last_metrics.cached_tokens >= shared - 2 * BLOCK
        assert chat.last_metrics.cached_tokens <= chat.last_metrics.prompt_tokens


def test_redo_and_loaded_sessions_hit_the_cache(chat, llm, tmp_path):
    chat.undo()
    chat.undo()
    chat.redo()
    list(chat.ask("Was she happy?"))
    before = chat.last_metrics
    assert before.cached_tokens >= before.prompt_tokens // 2
    session_file.write(tmp_path / "chat.json", SavedSession.from_chat(chat, "", 0, 0))
    other = Chat(llm)
    session_file.read(tmp_path / "chat.json").restore_into(other)
    list(other.ask("And now?"))
    assert other.last_metrics.cached_tokens >= before.prompt_tokens + before.output_tokens - 2 * BLOCK


def test_a_greedy_retry_gives_the_same_answer(chat):
    answer = chat.current.answer
    list(chat.regenerate(chat.current))
    assert chat.current.answer == answer


def test_a_resumed_conversation_is_loaded_from_the_disk(chat, tmp_path):
    cache = DiskCache(tmp_path / "cache", 10**9, kept_only=True)
    settings = dataclasses.replace(Settings.from_environment(), disk_cache=cache)

    def resume(llm):
        resumed = Chat(llm, SamplingParams(temperature=0, max_tokens=24))
        session_file.read(tmp_path / "chat.json").restore_into(resumed)
        list(resumed.ask("And now?"))
        return resumed

    session_file.write(tmp_path / "chat.json", SavedSession.from_chat(chat, "", 0, 0))
    with localllm.load("demo", device="cpu", settings=settings) as llm:
        llm.generate("What is not part of a conversation is not stored. " * 10, SamplingParams(max_tokens=1))
        computed = resume(llm)
    with localllm.load("demo", device="cpu", settings=settings) as llm:
        assert llm.generate("What is not part of a conversation " * 10).metrics.disk_tokens == 0
        resumed = resume(llm)
        assert resumed.last_metrics.disk_tokens >= resumed.last_metrics.prompt_tokens - BLOCK
    assert resumed.current.answer == computed.current.answer

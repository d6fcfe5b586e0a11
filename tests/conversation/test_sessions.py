import subprocess
import sys
import time

import pytest

from localllm.conversation import session_file
from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.conversation.session_file import SavedSession
from localllm.conversation.sessions import SessionStore, normalize_title
from localllm.errors import UsageError
from tests.cli.fake_engine import FakeLLM
from tests.work import counted_lines


@pytest.fixture
def sessions(tmp_path):
    return SessionStore(tmp_path / "chats")


def held(sessions, *questions, changed=0.0, title="", system=None, name=None):
    """Save a conversation, and return its name."""
    chat = Chat(FakeLLM(), system=system)
    for question in questions:
        list(chat.ask(question))
    return sessions.save(SavedSession.from_chat(chat, title, changed, changed), name, None)[0]


def test_names_sort_by_time_and_do_not_collide(sessions):
    names = [held(sessions, "hello", changed=changed) for changed in (1e9, 1e9, 1e9, 2e9)]
    assert len(set(names)) == 4
    assert sorted(names)[3] == names[3]
    assert names[3].startswith("20330518-033320-")
    assert all(path.stat().st_mode & 0o77 == 0 for path in (sessions.folder, *sessions.folder.iterdir()))


def test_a_list_is_newest_first(sessions):
    assert sessions.list() == []
    for changed, question in ((5, "five"), (9, "nine"), (7, "seven")):
        held(sessions, question, "more", changed=changed)
    assert [(one.title, one.header.questions, one.header.model) for one in sessions.list()] == [
        ("nine", 2, "demo"),
        ("seven", 2, "demo"),
        ("five", 2, "demo"),
    ]


def test_damaged_files_are_listed_as_damaged(sessions):
    held(sessions, "hello")
    (sessions.folder / "broken.json").write_text("{")
    (sessions.folder / "two words.json").write_text("{}")
    damaged = {one.id: one.error for one in sessions.list() if not one.header}
    assert "is not JSON" in damaged["broken"]
    assert "not a valid conversation name" in damaged["two words"]
    assert len(sessions.list()) == 3


def test_many_are_listed_by_their_first_lines(sessions, monkeypatch):
    held(sessions, *(f"question {number} " + "word " * 20 for number in range(10)))
    text = next(sessions.folder.glob("*.json")).read_text()
    monkeypatch.setattr(session_file, "read", lambda path: pytest.fail(f"all of {path} is read"))
    lines = list[int]()
    for files in (100, 400):
        for number in range(files):
            (sessions.folder / f"chat{number}.json").write_text(text)
        with counted_lines() as count:
            assert len(sessions.list()) == files + 1
        lines.append(count.lines)
    assert lines[1] < 5 * lines[0]
    assert lines[1] < 400 * 500  # 200 of a file measured


def test_a_conversation_is_resolved_by_a_prefix_of_its_name(sessions):
    with pytest.raises(UsageError, match="no conversation is saved yet"):
        sessions.resolve("last")
    first, second = held(sessions, "a", changed=1e9), held(sessions, "b", changed=1.5e9)
    held(sessions, "c", changed=5, name="monday")
    assert sessions.resolve(first) == first
    assert sessions.resolve(second[:5]) == second
    assert sessions.resolve("last") == second
    with pytest.raises(UsageError, match="2 conversations begin with 20"):
        sessions.resolve("20")
    with pytest.raises(UsageError, match=r"no conversation is saved as mondya; did you mean monday\?"):
        sessions.resolve("mondya")
    for name in ("../x", "a/b", ".lock", "", "x" * 65):
        with pytest.raises(UsageError, match="is not a valid conversation name"):
            sessions.resolve(name)


def test_search_matches_every_word_in_any_turn(sessions):
    held(sessions, "tell a story about a FOX", changed=1)
    held(sessions, "thinking", "count to ten", changed=2, system="you are a fox", title="numbers")
    held(sessions, "nothing", changed=3)

    def found(words):
        return [(hit.summary.header.changed, hit.question, hit.part, hit.match) for hit in sessions.search(words)]

    assert found("fox") == [(2, 0, "system", "fox"), (1, 1, "question", "FOX")]
    assert found("story fox") == [(1, 1, "question", "story")]
    assert found("Ten FOX") == [(2, 2, "answer", "ten")]
    assert found("numb") == [(2, 0, "title", "numb")]
    assert found("let me") == [(2, 1, "thoughts", "let")]
    assert found("nowhere") == found("") == found(" ") == []


def test_a_match_is_shown_with_its_context(sessions):
    held(sessions, "first\nline, " + "long " * 50 + "the needle lies\nhere " + "word " * 50)
    hit = next(sessions.search("NEEDLE"))
    assert (hit.before, hit.match) == ("…" + "long " * 7 + "the ", "needle")
    assert hit.after == " lies here" + " word" * 6 + "…"


def test_a_damaged_file_hides_no_other(sessions):
    held(sessions, "fox", changed=2)
    name = held(sessions, "fox", changed=1)
    file = sessions.path(name)
    file.write_bytes(file.read_bytes()[:-20])
    assert [hit.summary.header.changed for hit in sessions.search("fox")] == [2]


def test_a_renamed_conversation_keeps_its_content(sessions):
    name = held(sessions, "hello", changed=5)
    before, _ = sessions.read(name)
    sessions.rename(name, " a new\ntitle ")
    after, _ = sessions.read(name)
    assert (after.title, after.changed) == ("a new title", 5)
    assert [turn.answer for turn in after.root.descendants] == [turn.answer for turn in before.root.descendants]
    for title in ("", " \n", "x" * 201):
        with pytest.raises(UsageError, match="1 to 200 characters"):
            normalize_title(title)


def test_a_conversation_is_deleted_by_its_name_alone(sessions):
    name = held(sessions, "hello")
    assert sessions.delete(name[:10]) == name
    assert sessions.list() == []
    with pytest.raises(UsageError, match="no conversation is saved as"):
        sessions.delete(name)


@pytest.fixture
def session(tmp_path):
    llm = FakeLLM()
    return Session(llm, Chat(llm), tmp_path / "chats")


def say(session, text):
    said = "".join(event.text for event in session.ask(text))
    session.save()
    return said


def test_a_session_is_saved_and_resumed(session):
    assert session.save() == "" and session.id is None  # nobody spoke
    say(session, "hello")
    say(session, "more")
    other = Session(FakeLLM(), Chat(FakeLLM()), session.folder)
    other.load("last")
    assert (other.id, other.chat.messages) == (session.id, session.chat.messages)
    say(other, "and more")
    assert [one.header.questions for one in other.store.list()] == [3]


def test_only_what_has_changed_is_written(session):
    say(session, "hello")
    stamp = session.store.file_version(session.id)
    session.save()
    assert session.store.file_version(session.id) == stamp
    session.chat.undo()
    session.save()
    assert session.store.file_version(session.id) != stamp
    assert session.store.read(session.id)[0].current.depth == 0


def test_two_sessions_on_one_conversation_lose_nothing(session):
    say(session, "hello")
    other = Session(FakeLLM(), Chat(FakeLLM()), session.folder)
    other.load(session.id)
    say(session, "here")
    list(other.ask("there"))
    told = other.save()
    assert told == f"another process has continued {session.id}; this conversation is saved as {other.id}"
    questions = {
        tuple(turn.question for turn in session_file.read(p).current.path) for p in session.folder.glob("*.json")
    }
    assert questions == {("hello", "here"), ("hello", "there")}
    assert other.save() == ""


def test_a_conversation_deleted_while_open_is_saved_again(session):
    say(session, "hello")
    session.store.delete(session.id)
    say(session, "more")
    assert [one.header.questions for one in session.store.list()] == [2]


def test_a_new_conversation_leaves_the_one_before(session):
    say(session, "hello")
    before = session.id
    assert session.start_new() == before
    say(session, "new")
    assert session.id != before
    assert [one.title for one in session.store.list()] == ["new", "hello"]


def test_a_given_name_replaces_the_generated_one(session):
    say(session, "hello")
    session.save_as("monday")
    say(session, "more")
    session.save_as("tuesday")
    say(session, "yet more")
    assert {one.id: one.header.questions for one in session.store.list()} == {"monday": 2, "tuesday": 3}
    with pytest.raises(UsageError, match="another conversation is saved as monday"):
        session.save_as("monday")


def test_saving_can_be_switched_off(session):
    session.autosave = False
    say(session, "hello")
    assert not session.folder.exists()


WRITER = """
import sys
from pathlib import Path
from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from tests.cli.fake_engine import FakeLLM
for number in range(20):
    llm = FakeLLM()
    session = Session(llm, Chat(llm), Path(sys.argv[1]), began=1e9)
    for question in ("one", "two", "three"):
        list(session.ask(question))
        assert session.save() == ""
"""


def test_processes_save_to_separate_files(tmp_path):
    folder = tmp_path / "chats"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder)]) for _ in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert [one.header.questions for one in SessionStore(folder).list()] == [3] * 40
    assert len(list(folder.iterdir())) == 41  # and the lock


def test_a_title_set_elsewhere_is_no_conflict(session):
    say(session, "hello")
    name = session.id
    session.store.rename(name, "birds")
    list(session.ask("more"))
    assert session.save() == ""
    assert [(one.id, one.title, one.header.questions) for one in session.store.list()] == [(name, "birds", 2)]


def session_of(sessions, llm=None):
    llm = llm or FakeLLM()
    return Session(llm, Chat(llm), sessions.folder)


def test_a_question_is_saved_before_its_answer(sessions):
    session = session_of(sessions)
    kept = []
    session.llm.answer = lambda chat: kept.append(sessions.list()) or FakeLLM.answer(session.llm, chat)
    list(session.ask("What is kept?"))
    [[one]] = kept
    assert one.title == "What is kept?"
    assert session.save() == ""
    assert [one.id for one in sessions.list()] == [session.id]


def test_a_question_without_any_answer_leaves_no_file(sessions):
    session = session_of(sessions)

    def refuse(*_, **__):
        raise UsageError("too long")

    session.llm.answer = refuse
    with pytest.raises(UsageError):
        list(session.ask("first"))
    session.save()
    assert sessions.list() == []
    del session.llm.answer
    list(session.ask("hello"))
    session.save()
    session.llm.answer = refuse
    with pytest.raises(UsageError):
        list(session.ask("second"))
    session.save()
    assert [one.header.questions for one in sessions.list()] == [1]


def test_a_failed_save_is_reported_after_the_answer(sessions):
    session = session_of(sessions)
    sessions.folder.parent.mkdir(exist_ok=True)
    sessions.folder.write_text("a file where the folder should be")
    list(session.ask("hello"))
    with pytest.raises(UsageError, match="cannot be saved"):
        session.save()


KILLED = """
import sys, time
import localllm
from pathlib import Path
from localllm.conversation import chat
from localllm.conversation.session import Session
chat.CHECKPOINT_INTERVAL_S = 0.1
llm = localllm.load("demo")
params = localllm.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
session = Session(llm, chat.Chat(llm, params), Path(sys.argv[1]))
for event in session.ask("Tell me a story."):
    time.sleep(0.02)
"""


def test_a_killed_process_leaves_the_question_and_partial_answer(sessions):
    def answer() -> str:
        return "".join(sessions.read(one.id)[0].current.answer for one in sessions.list())

    with subprocess.Popen([sys.executable, "-c", KILLED, sessions.folder]) as process:
        gives_up = time.monotonic() + 200
        while len(answer()) <= 20 and process.poll() is None and time.monotonic() < gives_up:
            time.sleep(0.02)
        process.kill()
    [one] = sessions.list()
    kept = sessions.read(one.id)[0]
    assert kept.current.question == "Tell me a story."
    assert len(kept.current.answer) > 20
    assert (kept.current.finish_reason, kept.current.metrics) == (None, None)

import json

import pytest

from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from tests.cli.fake_engine import FakeLLM


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home" / "chats"


@pytest.fixture
def names(home):
    """Save two conversations, and return their names, the older first."""
    found = []
    for began, question in ((1e9, "a story about a fox"), (1.1e9, "count to ten")):
        session = Session(FakeLLM(), Chat(FakeLLM()), home, began=began)
        list(session.ask(question))
        list(session.chat.regenerate(session.chat.current))
        session.save()
        found.append(session.id)
    return found


def test_conversations_are_listed_newest_first(localllm, names):
    code, out, err = localllm("chats")
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == ["ID", "CHANGED", "QUESTIONS", "MODEL", "TITLE"]
    assert [(line[0], line[3], line[4]) for line in lines[1:]] == [(name, "2", "demo") for name in names[::-1]]


def test_the_list_as_json(localllm, names):
    code, out, _ = localllm("chats", "--json")
    found = json.loads(out)
    assert code == 0
    assert [(one["id"], one["title"], one["questions"], one["fault"]) for one in found] == [
        (names[1], "count to ten", 2, None),
        (names[0], "a story about a fox", 2, None),
    ]
    assert found[1]["began"] == "2001-09-09T01:46:40Z"


def test_no_conversation_is_an_empty_list(localllm):
    assert localllm("chats", "--json") == (0, "[]\n", "")
    assert localllm("chats")[:2] == (0, "ID  CHANGED  QUESTIONS  MODEL  TITLE\n")


def test_words_are_searched(localllm, names):
    assert localllm("chats", "FOX", "story") == (
        0,
        f"{names[0]}  a story about a fox\n    question 1, question: a story about a fox\n",
        "",
    )
    hit = json.loads(localllm("chats", "ten", "--json")[1])
    assert (hit[0]["id"], hit[0]["place"]["part"], hit[0]["place"]["match"]) == (names[1], "question", "ten")
    assert localllm("chats", "wolf") == (0, "", "no conversation contains all of these words\n")


def test_a_conversation_is_exported(localllm, names, tmp_path):
    code, out, _ = localllm("chats", "--export", "last")
    assert code == 0 and out.startswith('---\ntitle: "count to ten"\n')
    assert out.count("## Question") == 1
    assert localllm("chats", "--export", names[0], "--all")[1].count("## Question") == 2
    code, out, _ = localllm("chats", "--export", names[0], "--format", "json")
    assert json.loads(out)["messages"][0] == {"role": "user", "content": "a story about a fox"}
    file = tmp_path / "one.json"
    assert localllm("chats", "--export", names[0][:9], "-o", str(file)) == (0, "", "")
    assert file.read_text() == out


def test_conversations_are_deleted_all_or_none(localllm, names, home):
    code, _, err = localllm("chats", "--rm", names[0], "--rm", "none")
    assert code == 2 and "no conversation is saved as none" in err
    assert len(list(home.glob("*.json"))) == 2
    assert localllm("chats", "--rm", names[0]) == (0, f"removed {names[0]}\n", "")
    assert json.loads(localllm("chats", "--rm", "last", "--json")[1]) == [{"id": names[1]}]
    assert list(home.glob("*.json")) == []


def test_a_damaged_file_is_listed_and_reported(localllm, names, home):
    (home / "broken.json").write_text("{")
    code, out, err = localllm("chats")
    assert code == 0 and "broken" in out and "broken.json is not JSON" in err
    assert localllm("chats", "--export", "broken")[0] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fox", "--export", "last"], "leave out all but one"),
        (["--rm", "a", "--export", "last"], "leave out all but one"),
        (["--format", "md"], "add --export ID"),
        (["--all"], "add --export ID"),
        (["--export", "last", "--json"], "--format json"),
        (["--export", "last", "--format", "pdf"], "use md or json"),
        (["--export", "../x"], "is not a valid conversation name"),
        (["--export", "last", "-o", "none/x.md"], "cannot be written"),
    ],
)
def test_invalid_options_are_rejected(localllm, names, words, told):
    code, out, err = localllm("chats", *words)
    assert (code, out) == (2, "")
    assert told in err


def test_flags_of_one_answer_resume_no_conversation(localllm, model, names):
    code, _, err = localllm("run", model, "hello", "--resume", "last")
    assert code == 2 and "--resume is for conversations, and there is a prompt" in err

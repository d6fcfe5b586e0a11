import json

import pytest

from localllm.conversation.chat import Chat
from localllm.errors import ContextOverflow, UsageError
from localllm.request import Grammar, GrammarKind, SamplingParams
from tests.cli.fake_engine import FakeLLM


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def chat(llm):
    return Chat(llm, system="be brief")


def say(chat, text):
    return "".join(event.text for event in chat.ask(text))


def test_question_and_answer_become_part_of_the_conversation(chat, llm):
    assert say(chat, "hello") == "2[be brief]:hello"
    assert say(chat, "again") == "4[be brief]:again"
    assert llm.asked[-1][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "2[be brief]:hello"},
        {"role": "user", "content": "again"},
    ]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2


def test_an_answer_that_is_stopped_half_way_keeps_what_was_said(chat, llm):
    answer = chat.ask("hello")
    text = next(answer).text + next(answer).text
    answer.close()
    assert llm.cancelled
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    assert chat.used_tokens is None


def test_an_error_leaves_the_conversation_as_it_was(chat):
    say(chat, "hello")
    before = list(chat.messages)
    with pytest.raises(ContextOverflow):
        say(chat, "x" * 5000)
    assert chat.messages == before


def test_an_answer_of_no_words_is_an_answer(chat, monkeypatch):
    monkeypatch.setattr(chat.model, "_answer", lambda prompt, text: " ")
    say(chat, "hello")
    assert chat.messages[-1] == {"role": "assistant", "content": " "}


def test_thoughts_stay_with_their_answer(chat, tmp_path):
    assert "thinking" in "".join(event.text for event in chat.ask("thinking") if event.kind == "content")
    turn = {"role": "assistant", "content": "2[be brief]:thinking", "reasoning_content": "let me see\x07"}
    assert chat.messages[-1] == turn
    chat.save(tmp_path / "chat.json")
    other = Chat(FakeLLM())
    other.load(tmp_path / "chat.json")
    assert other.messages[-1] == turn


def test_thoughts_alone_are_no_answer(chat):
    answer = chat.ask("thinking")
    next(answer)
    answer.close()
    assert chat.messages == []


def test_template_arguments_go_with_every_question():
    llm = FakeLLM()
    chat = Chat(llm, template_arguments={"enable_thinking": False})
    say(chat, "hello")
    assert llm.given[-1] == (None, {"enable_thinking": False})


def test_undo_gives_the_last_question_back(chat):
    say(chat, "one")
    say(chat, "two")
    assert chat.undo() == "two"
    assert len(chat.messages) == 2
    assert chat.undo() == "one"
    assert chat.undo() is None


def test_clear_forgets_what_was_said_and_nothing_else(chat):
    say(chat, "one")
    chat.clear()
    assert (chat.messages, chat.system, chat.used_tokens) == ([], "be brief", None)


def test_used_tokens_are_those_of_the_last_turn(chat):
    assert chat.used_tokens is None
    answer = say(chat, "hello")
    assert chat.used_tokens == len("hello") + len(answer)


def test_parameters_begin_with_those_of_the_model(chat, llm):
    say(chat, "hello")
    assert llm.asked[-1][1] == llm.default_params


def test_a_model_without_a_template_continues_the_text_so_far():
    llm = FakeLLM(has_chat_template=False)
    chat = Chat(llm)
    say(chat, "once")
    say(chat, "upon")
    assert llm.asked[-1][0] == "once\nraw:once\nupon"
    chat.system = "be brief"
    with pytest.raises(UsageError, match="no chat template for a system prompt"):
        say(chat, "hello")


def test_a_saved_conversation_comes_back_whole(chat, tmp_path):
    say(chat, "hello ü")
    chat.params = SamplingParams(
        temperature=0.1,
        stop=("a", "b"),
        stop_ids=(3,),
        logit_bias={5: float("-inf")},
        seed=4,
        grammar=Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    )
    file = tmp_path / "chats" / "one.json"
    chat.save(file)
    other = Chat(FakeLLM(name="other"))
    assert other.load(file) == "demo"
    assert (other.messages, other.system, other.params) == (chat.messages, chat.system, chat.params)
    assert [path.name for path in file.parent.iterdir()] == ["one.json"]
    assert file.stat().st_mode & 0o77 == 0


GOOD = {"version": 1, "model": "m", "system": None, "params": {"logit_bias": {}}, "messages": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "no conversation of format 1"),
        ({"system": 3}, "system is no text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "do not take turns"),
        ({"messages": [{"role": "user"}]}, "damaged"),
        ({"messages": None}, "damaged"),
        ({"params": {}}, "damaged"),
        ({"params": {"logit_bias": {}, "speed": 3}}, "damaged"),
        ({"params": {"logit_bias": {}, "temperature": -1}}, "temperature"),
        ({"params": {"logit_bias": {"x": 1}}}, "damaged"),
    ],
)
def test_a_damaged_file_changes_nothing(chat, tmp_path, change, message):
    say(chat, "hello")
    before = list(chat.messages)
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(UsageError, match=message):
        chat.load(file)
    assert (chat.messages, chat.system) == (before, "be brief")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_what_is_no_json_object_is_refused(chat, tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"chat\.json"):
        chat.load(file)


def test_a_conversation_that_is_not_there_is_one_sentence(chat, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        chat.load(tmp_path / "none.json")


def test_a_failed_save_leaves_the_old_file(chat, tmp_path, monkeypatch):
    file = tmp_path / "chat.json"
    chat.save(file)
    before = file.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(UsageError, match="cannot be saved: disk is full"):
        chat.save(file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]

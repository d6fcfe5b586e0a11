import pytest

from localllm.conversation.chat import Chat
from localllm.errors import ContextOverflow, UsageError
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


def test_a_stopped_answer_is_kept(chat, llm):
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


def test_an_empty_answer_is_an_answer(chat, monkeypatch):
    monkeypatch.setattr(chat.model, "_answer", lambda prompt, text: " ")
    say(chat, "hello")
    assert chat.messages[-1] == {"role": "assistant", "content": " "}


def test_thoughts_stay_with_their_answer(chat):
    assert "thinking" in "".join(event.text for event in chat.ask("thinking") if event.kind == "content")
    turn = {"role": "assistant", "content": "2[be brief]:thinking", "reasoning_content": "let me see\x07"}
    assert chat.messages[-1] == turn


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


def test_clear_drops_the_turns_alone(chat):
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

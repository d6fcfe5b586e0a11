import json
from pathlib import Path

import pytest

from localllm.conversation import commands
from localllm.conversation.chat import Chat
from localllm.conversation.commands import COMMANDS, has_open_quotes, strip_triple_quotes
from localllm.conversation.session import Session
from localllm.errors import UsageError
from tests.cli.fake_engine import FakeLLM


@pytest.fixture
def session(tmp_path):
    llm = FakeLLM()
    return Session(llm, Chat(llm), tmp_path / "chats")


def execute(session, line):
    """Execute a slash command, and return its text."""
    return commands.execute(session, line).text


def talk(session, text="hello"):
    return "".join(event.text for event in session.ask(text))


@pytest.mark.parametrize(
    "line", ["/hepl", "/shwo", "/sett parameter top_k 3", "/quit", "/Help", "/etc/passwd", "/"]
)
def test_an_unknown_command_is_an_error_and_never_sent(session, line):
    with pytest.raises(UsageError, match=f"there is no command {line.split()[0]}; .*a space before the / sends"):
        execute(session, line)
    assert session.llm.asked == []


def test_near_names_are_given(session):
    with pytest.raises(UsageError, match=r"did you mean /help\?"):
        execute(session, "/hepl")


def test_help_names_every_command(session):
    text = execute(session, "/?")
    assert text == execute(session, "/help")
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0", "temperature", 0),
        ("temperature 0.5", "temperature", 0.5),
        ("top_k 3", "top_k", 3),
        ("seed 7", "seed", 7),
        ("seed none", "seed", None),
        ("stop none", "stop", ()),
        ("logit_bias none", "logit_bias", {}),
        ("temperature none", "temperature", 1.0),
        ("max_tokens 10", "max_tokens", 10),
        ("ignore_eos true", "ignore_eos", True),
        ("ignore_eos on", "ignore_eos", True),
        ("stop END 'two words'", "stop", ("END", "two words")),
        ("stop_ids 1 2", "stop_ids", (1, 2)),
        ("logit_bias 5=-inf 7=1", "logit_bias", {5: float("-inf"), 7: 1.0}),
    ],
)
def test_a_parameter_is_set(session, line, name, value):
    execute(session, f"/set parameter {line}")
    assert getattr(session.chat.params, name) == value
    assert session.chat.params.top_p == session.llm.default_params.top_p


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("parameter temperature -1", "temperature is -1; give a number from 0"),
        ("parameter temperature hot", "temperature is 'hot'"),
        ("parameter top_k 1.5", "give a whole number"),
        ("parameter temprature 1", "did you mean temperature"),
        ("parameter top_k 1 2", "takes one value"),
        ("parameter logprobs 1", "there is no parameter logprobs"),
        ("parameter stop_ids x", "are not token ids"),
        ("parameter logit_bias 5", "is not ID=BIAS"),
        ("parameter stop 'open", "close the quotes"),
        ("parameter num_ctx 2048", "the context is chosen at start; use `localllm run` with --context 2048"),
        ("parameter temperature", "/set takes parameter NAME VALUE"),
        ("format json", "/set format json is unknown or incomplete; /set takes parameter NAME VALUE, system TEXT"),
        ("", "/set needs a name; /set takes parameter NAME VALUE, system TEXT, verbose or quiet"),
    ],
)
def test_a_wrong_setting_changes_nothing_and_says_why(session, line, message):
    before = session.chat.params
    with pytest.raises(UsageError, match=message):
        execute(session, f"/set {line}")
    assert session.chat.params == before


def test_parameters_are_listed(session):
    table = dict(line.split(maxsplit=1) for line in execute(session, "/set parameter").splitlines())
    assert table["temperature"] == "0.7"
    assert [table[name] for name in ("seed", "stop", "logit_bias", "ignore_eos")] == ["-", "-", "-", "off"]


@pytest.mark.parametrize(
    "value", ["stop END 'two words'", "stop_ids 1 2", "logit_bias 5=-inf 7=1", "ignore_eos on", "seed 7"]
)
def test_a_parameter_is_listed_as_it_is_typed(session, value):
    name, words = value.split(maxsplit=1)
    assert execute(session, f"/set parameter {value}") == f"{name} = {words}"
    assert words in execute(session, "/set parameter")
    assert f"{name}={words}" in execute(session, "/show")


def test_verbose_and_quiet(session):
    execute(session, "/set verbose")
    assert session.verbose
    execute(session, "/set quiet")
    assert not session.verbose


def test_thinking_is_switched(session):
    talk(session)
    assert session.llm.given[-1][1] == {}
    assert execute(session, "/set nothink") == "nothink: the model does not think before it answers"
    talk(session)
    assert session.llm.given[-1][1] == {"enable_thinking": False}
    execute(session, "/set think")
    assert "template     default, enable_thinking=True" in execute(session, "/show")


def test_show_prints_model_parameters_and_context(session):
    assert "no messages yet, 4096 at most" in execute(session, "/show")
    answer = talk(session)
    shown = execute(session, "/show")
    assert "template     default" in shown
    assert f"{len('hello' + answer)} tokens used, 4096 at most" in shown
    assert "temperature=0.7 top_k=40" in shown


def test_system_is_set_shown_and_removed(session):
    execute(session, '/system """be\nbrief"""')
    assert session.chat.system == "be\nbrief"
    assert execute(session, "/system") == "be\nbrief"
    assert execute(session, "/set system You're a cat") == "system prompt set"
    assert execute(session, "/set system") == session.chat.system == "You're a cat"
    execute(session, '/set system """be\nbrief"""')
    assert session.chat.system == "be\nbrief"
    execute(session, "/system none")
    assert session.chat.system is None


def test_undo_and_clear(session):
    talk(session, "one\nmore")
    talk(session, "two")
    assert execute(session, "/undo") == "undone: two"
    assert execute(session, "/undo") == "undone: one"
    with pytest.raises(UsageError, match="nothing to undo"):
        execute(session, "/undo")
    talk(session)
    execute(session, "/clear")
    assert session.chat.messages == []


def test_a_conversation_is_saved_and_loaded_by_name(session):
    talk(session)
    execute(session, "/set parameter temperature 0.1")
    execute(session, "/save monday")
    other = Session(FakeLLM("other"), Chat(FakeLLM("other")), session.folder)
    assert execute(other, "/load monday") == "loaded 2 messages (it used demo)"
    assert other.chat.params.temperature == 0.1
    with pytest.raises(UsageError, match="no conversation is saved as tuesday; `localllm chats` lists them"):
        execute(other, "/load tuesday")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "/tmp/x", "two words", "x" * 65, "ü", "a\nb"])
@pytest.mark.parametrize("command", ["/save", "/load"])
def test_a_name_is_never_a_path(session, command, name):
    with pytest.raises(UsageError, match="is not a valid conversation name"):
        execute(session, f"{command} {name}")
    assert not session.folder.exists()


def test_an_unwritable_path_is_one_error_message(session, tmp_path):
    session.folder = Path("/dev/null/chats")
    with pytest.raises(UsageError, match="cannot be saved"):
        execute(session, "/save x")


@pytest.mark.parametrize("line", ["/bye", "/exit"])
def test_leaving(session, line):
    with pytest.raises(EOFError):
        execute(session, line)


@pytest.mark.parametrize(
    ("text", "plain"),
    [(' """a\nb""" ', "a\nb"), ('"""\na\n"""', "a"), ('"""a', '"""a'), ('""""', '""""'), (" a ", "a")],
)
def test_triple_quotes_are_taken_off(text, plain):
    assert strip_triple_quotes(text) == plain


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("", False),
        ("hello", False),
        ('"""', True),
        ('  """hello', True),
        ('"""hello\nworld', True),
        ('"""hello"""', False),
        ('"""hello\n"""  ', False),
        ('""""""', False),
        ('/system """be', True),
        ('/system """be"""', False),
        ('/set system """be', True),
        ('/set system """be"""', False),
        ('say """ to begin', False),
    ],
)
def test_quotes_that_are_open_let_enter_begin_a_new_line(text, is_open):
    assert has_open_quotes(text) is is_open


def test_the_last_question_is_edited(session):
    talk(session, "one")
    talk(session, "two")
    done = commands.execute(session, "/edit")
    assert (done.edit_text, done.start_answer) == ("two", None)
    assert talk(session, "three") == "3:three"
    assert [turn.question for turn in session.chat.turns] == ["one", "three"]
    assert "".join(event.text for event in commands.execute(session, "/edit four").start_answer()) == "3:four"
    assert [way.question for way in session.chat.current.siblings] == ["two", "three", "four"]


def test_another_command_ends_an_edit(session):
    talk(session, "one")
    commands.execute(session, "/edit")
    execute(session, "/show")
    talk(session, "two")
    assert [turn.question for turn in session.chat.turns] == ["one", "two"]


def test_an_edit_brings_in_files_again(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("before")
    talk(session, r"see @a.txt, not \@a.txt")
    assert "before" in session.llm.asked[-1][0][0]["content"]
    (tmp_path / "a.txt").write_text("after")
    list(commands.execute(session, "/regenerate").start_answer())
    assert "before" in session.llm.asked[-1][0][0]["content"]
    draft = commands.execute(session, "/edit").edit_text
    assert draft.startswith("see @a.txt")
    talk(session, draft)
    assert "after" in session.llm.asked[-1][0][0]["content"]


def test_undo_and_redo_and_branches(session):
    talk(session, "one")
    talk(session, "two")
    execute(session, "/undo")
    assert execute(session, "/redo") == "redone: two"
    with pytest.raises(UsageError, match="nothing to redo"):
        execute(session, "/redo")
    list(commands.execute(session, "/regenerate").start_answer())
    list(commands.execute(session, "/edit three").start_answer())
    rows = [line.split() for line in execute(session, "/branch").splitlines()]
    assert [row[:-1] for row in rows[1:]] == [["1", "2", "two"], ["2", "2", "two"], ["*", "3", "2", "three"]]
    assert execute(session, "/branch 1") == "on branch 1, after: two"
    assert session.chat.current.answer == "3:two"
    for number in ("0", "4", "x", "1 2", "9" * 30):
        with pytest.raises(UsageError, match=f"there is no branch {number}; /branch lists them, 1 to 3"):
            execute(session, f"/branch {number}")


@pytest.mark.parametrize("command", ["/edit", "/edit x", "/regenerate", "/branch", "/branch 1", "/export x.md"])
def test_commands_before_the_first_turn_do_nothing(session, command):
    with pytest.raises(UsageError):
        execute(session, command)


def test_changes_by_commands_are_saved(session):
    talk(session, "one")
    session.save()
    for command in ("/title a title", "/system be brief", "/undo"):
        execute(session, command)
    found = session.store.read(session.id)[0]
    assert (found.title, found.system, found.current.depth) == ("a title", "be brief", 0)


def test_a_new_conversation_names_the_one_before(session):
    assert execute(session, "/new").endswith("these parameters")
    execute(session, "/set nohistory")
    talk(session, "one")
    assert "the previous one is discarded" in execute(session, "/new")
    talk(session, "one")
    execute(session, "/set history")
    session.save()
    before = session.id
    assert f"/load {before} continues it" in execute(session, "/clear")
    assert execute(session, f"/load {before[:12]}") == "loaded 2 messages"


def test_conversations_are_listed_searched_and_loaded(session):
    assert execute(session, "/sessions") == "no conversation is saved yet"
    talk(session, "a story about a fox")
    session.save()
    assert session.id in execute(session, "/sessions") and "a story about a fox" in execute(session, "/sessions")
    assert execute(session, "/search FOX story").splitlines() == [
        f"{session.id}  a story about a fox",
        "    question 1, question: a story about a fox",
    ]
    assert execute(session, "/search wolf") == "no conversation has all of these words"
    with pytest.raises(UsageError, match="/search WORDS"):
        execute(session, "/search")


def test_nothing_is_saved_when_saving_is_off(session):
    execute(session, "/set nohistory")
    talk(session)
    session.save()
    assert not session.folder.exists()
    execute(session, "/set history")
    session.save()
    assert len(session.store.list()) == 1


def test_a_conversation_is_exported_and_overwrites_nothing(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk(session, "one")
    list(commands.execute(session, "/regenerate").start_answer())
    assert execute(session, "/export one.md") == "exported to one.md"
    assert execute(session, "/export all two.json") == "exported to two.json"
    assert "## Question 1\n\none" in (tmp_path / "one.md").read_text()
    assert len(json.loads((tmp_path / "two.json").read_text())["turns"]) == 2
    with pytest.raises(UsageError, match=r"one\.md already exists; use another file"):
        execute(session, "/export one.md")
    with pytest.raises(UsageError, match=r"FILE\.md or FILE\.json"):
        execute(session, "/export one.txt")
    with pytest.raises(UsageError, match="cannot be written"):
        execute(session, "/export none/one.md")


def test_every_command_is_offered():
    assert dict(commands.command_help()).keys() == COMMANDS.keys()

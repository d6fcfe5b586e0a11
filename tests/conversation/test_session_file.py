import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.conversation import session_file
from localllm.conversation.attach import Attachment
from localllm.conversation.chat import Chat, Turn
from localllm.conversation.session_file import SavedSession
from localllm.errors import UsageError
from localllm.metrics import Metrics
from localllm.request import FinishReason, Grammar, GrammarKind, SamplingParams
from tests.cli.fake_engine import FakeLLM
from tests.work import counted_lines


def tree(root):
    """All properties of a tree of turns that a file stores."""
    return [
        (
            turn.question,
            turn.depth,
            turn.parent.children.index(turn),
            turn.parent.chosen_child is turn,
            turn.answer,
            turn.thoughts,
            turn.model,
            turn.finish_reason,
            turn.attachments,
            turn.asked_at,
            turn.metrics and turn.metrics.output_tokens,
        )
        for turn in root.descendants
    ]


def say(chat, text, **more):
    return "".join(event.text for event in chat.ask(text, **more))


@pytest.fixture
def chat():
    chat = Chat(FakeLLM(), system="be brief", template_arguments={"depth": [1, None]})
    say(chat, "hello ü\u2028 \x00", attachments=(Attachment("a b.txt", "```\n"),))
    say(chat, "thinking")
    stopped = chat.ask("more")
    next(stopped)
    stopped.close()
    list(chat.edit(chat.turns[1], "another"))
    list(chat.regenerate(chat.turns[0]))
    chat.switch_to(chat.branches[0])
    chat.undo()
    return chat


def test_a_tree_survives_a_round_trip(chat, tmp_path):
    chat.params = SamplingParams(
        temperature=0.1,
        stop=("a", "b"),
        stop_ids=(3,),
        logit_bias={5: float("-inf")},
        seed=4,
        grammar=Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    )
    file = tmp_path / "chats" / "one.json"
    session_file.write(file, SavedSession.from_chat(chat, "", 1.5, 2.5))
    back = session_file.read(file)
    other = Chat(FakeLLM())
    back.restore_into(other)
    assert tree(other.root) == tree(chat.root)
    assert (other.messages, other.system, other.params) == (chat.messages, chat.system, chat.params)
    assert other.template_arguments == chat.template_arguments
    assert (back.title, back.began, back.changed, back.model) == ("hello ü \x00", 1.5, 2.5, "demo")
    assert session_file.to_text(SavedSession.from_chat(other, "", 1.5, 2.5)) == file.read_text()
    assert other.redo() and other.current.question == "more"
    assert [path.name for path in file.parent.iterdir()] == ["one.json"]
    assert (file.stat().st_mode & 0o77, file.parent.stat().st_mode & 0o77) == (0, 0)


def test_another_model_keeps_the_arguments_of_its_own_template(chat, tmp_path):
    session_file.write(tmp_path / "one.json", SavedSession.from_chat(chat, "", 0, 0))
    other = Chat(FakeLLM("other"), template_arguments={"enable_thinking": False})
    session_file.read(tmp_path / "one.json").restore_into(other)
    assert other.template_arguments == {"enable_thinking": False}


def test_numbers_of_an_answer_come_back_without_those_of_single_tokens(tmp_path):
    chat = Chat(FakeLLM())
    say(chat, "hello")
    session_file.write(tmp_path / "one.json", SavedSession.from_chat(chat, "", 0, 0))
    other = Chat(FakeLLM())
    session_file.read(tmp_path / "one.json").restore_into(other)
    before, after = chat.last_metrics, other.last_metrics
    assert (after.prompt_tokens, after.output_tokens, after.ttft_s) == (5, 7, before.ttft_s)
    assert (after.tokens_per_s, after.itl_s) == (before.tokens_per_s, ())
    assert other.used_tokens == chat.used_tokens


def test_missing_measurements_stay_missing(tmp_path):
    chat = Chat(FakeLLM())
    say(chat, "hello")
    chat.current.metrics = Metrics(1, 0, 0, math.nan, 0, math.nan, math.nan, (), 1, 0)
    session_file.write(tmp_path / "one.json", SavedSession.from_chat(chat, "", 0, 0))
    assert math.isnan(session_file.read(tmp_path / "one.json").current.metrics.ttft_s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "not a conversation of format 2"),
        ({"version": 3}, "not a conversation of format 2"),
        ({"version": True}, "not a conversation of format 2"),
        ({"system": 3}, "system is not a string"),
        ({"turns": None}, "damaged"),
        ({"params": {}}, "damaged"),
        ({"params": {"logit_bias": {}, "speed": 3}}, "damaged"),
        ({"params": {"logit_bias": {}, "temperature": -1}}, "temperature"),
        ({"params": {"logit_bias": {"x": 1}}}, "damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, message):
    file = tmp_path / "chat.json"
    chat = Chat(FakeLLM())
    say(chat, "hello")
    session_file.write(file, SavedSession.from_chat(chat, "", 0, 0))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        session_file.read(file)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"1", b'{"version": [2]}', b"[" * 100_000])
def test_a_file_without_a_json_object_is_rejected(tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"chat\.json"):
        session_file.read(file)


def test_a_file_larger_than_any_is_not_read(tmp_path):
    with (tmp_path / "chat.json").open("wb") as file:
        file.truncate(session_file.MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match="too large for a conversation"):
        session_file.read(tmp_path / "chat.json")


@pytest.mark.parametrize(
    ("turn", "field", "value", "message"),
    [
        (0, "parent", 0, "before its definition"),
        (1, "parent", 2, "before its definition"),
        (1, "parent", -1, "not a count"),
        (1, "parent", 0.0, "not a count"),
        (1, "parent", "0", "not a count"),
        (1, "question", 3, "question is not a string"),
        (1, "chosen", 1, "not of type bool"),
        (0, "chosen", False, "no turn is chosen"),
        (3, "chosen", True, "two turns are chosen"),
        (1, "finish_reason", "bored", "bored"),
        (1, "asked", -1, "not a number"),
        (1, "asked", 1e300, "not a number"),
        (1, "metrics", {"prompt_tokens": -1}, "not a count"),
        (1, "metrics", {"ttft_s": "soon"}, "not a number"),
        (1, "metrics", [], "not of type dict"),
        (1, "attached", [{"name": "x"}], "text"),
        (1, "attached", "x", "not of type list"),
        (1, "model", None, "model is not a string"),
    ],
)
def test_a_damaged_turn_is_refused(chat, tmp_path, turn, field, value, message):
    content = json.loads(session_file.to_text(SavedSession.from_chat(chat, "", 0, 0)))
    content["turns"][turn][field] = value
    (tmp_path / "chat.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=f"damaged conversation.*{message}"):
        session_file.read(tmp_path / "chat.json")


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("seed", range(5))
def test_no_change_of_a_byte_or_a_value_gets_through_unseen_or_crashes(chat, tmp_path, seed):
    """The file is refused with one sentence, or read as a conversation that can be written again."""
    text, chance = session_file.to_text(SavedSession.from_chat(chat, "", 0, 0)), random.Random(seed)
    values = [None, True, -1, 1e400, 2**70, "x", [], {}, [[]], {"a": 1}]
    for _ in range(200):
        if chance.random() < 0.5:
            place = chance.randrange(len(text))
            damaged = text[:place] + chance.choice('"{}[],:0x\\ ') + text[place + chance.randrange(3) :]
        else:
            content = json.loads(text)
            where = chance.choice([content, *content["turns"], content["params"], content["turns"][0]["metrics"]])
            where[chance.choice(list(where))] = chance.choice(values)
            damaged = json.dumps(content)
        (tmp_path / "chat.json").write_text(damaged)
        try:
            found = session_file.read(tmp_path / "chat.json")
        except UsageError:
            continue
        session_file.to_text(found)
        session_file.read_header(tmp_path / "chat.json")


def test_a_missing_conversation_is_one_error_message(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        session_file.read(tmp_path / "none.json")


def test_a_failed_save_leaves_the_old_file(chat, tmp_path, monkeypatch):
    file = tmp_path / "chat.json"
    session_file.write(file, SavedSession.from_chat(chat, "", 0, 0))
    before = file.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(UsageError, match="cannot be saved: disk is full"):
        session_file.write(file, SavedSession.from_chat(chat, "", 1, 1))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_text_that_cannot_be_encoded_is_one_error_message(tmp_path):
    chat = Chat(FakeLLM())
    say(chat, "\udc80")
    with pytest.raises(UsageError, match="cannot be saved"):
        session_file.write(tmp_path / "chat.json", SavedSession.from_chat(chat, "", 0, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_title_is_the_start_of_the_first_question():
    chat = Chat(FakeLLM())
    assert session_file.default_title(chat.root) == ""
    say(chat, "  what\n\tis " + "very " * 100)
    assert session_file.default_title(chat.root) == ("what is " + "very " * 100)[:59].rstrip() + "…"


def test_the_first_line_is_all_that_a_list_reads(chat, tmp_path):
    file = tmp_path / "chat.json"
    session_file.write(file, SavedSession.from_chat(chat, "a title", 3, 4))
    head = session_file.read_header(file)
    assert head == ("a title", "demo", 3, 4, 5)
    line = file.read_bytes().split(b"\n")[0]
    file.write_bytes(line + b"\nnot JSON at all")
    assert session_file.read_header(file) == head
    with pytest.raises(UsageError):
        session_file.read(file)


def test_a_reformatted_file_is_read(chat, tmp_path):
    file = tmp_path / "chat.json"
    content = json.loads(session_file.to_text(SavedSession.from_chat(chat, "a title", 3, 4)))
    file.write_text(json.dumps(content, indent=4, sort_keys=True))
    assert session_file.read_header(file) == ("a title", "demo", 3, 4, 5)


def test_a_long_conversation_is_written_and_read_in_time_linear_in_it(tmp_path):
    """2,000 messages in one branch, 1 MB: no recursion, and nothing that is done for each pair of them."""
    lines = list[int]()
    for turns in (250, 1000):
        root = at = Turn("", None)
        for number in range(turns):
            turn = Turn(
                f"question {number}", at, "word " * 200, asked_at=float(number), finish_reason=FinishReason.STOP
            )
            at.children.append(turn)
            at.chosen_child = at = turn
        conversation = SavedSession("t", "m", 0, 0, SamplingParams(), root=root, current=at)
        with counted_lines() as count:
            session_file.write(tmp_path / "chat.json", conversation)
            back = session_file.read(tmp_path / "chat.json")
        lines.append(count.lines)
        assert tree(back.root) == tree(root)
        assert back.current.depth == turns
    assert lines[1] < 5 * lines[0]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "edit", "again", "undo", "redo", "switch", "stop", "fail", "early", "clear"]),
        st.integers(0, 99),
    ),
    max_size=40,
)


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(steps=STEPS)
def test_any_conversation_stays_consistent_and_survives_a_round_trip(steps, tmp_path_factory):
    """Compared with a model: no turn is ever lost or moved except by `clear`."""
    llm = FakeLLM()
    chat, said = Chat(llm), []
    for asked, (what, number) in enumerate(steps):
        turns = list(chat.root.descendants)
        turn = turns[number % len(turns)] if turns else None
        before = chat.current
        text = f"{asked}"
        match what:
            case "ask":
                say(chat, text)
                said.append((before, chat.current))
            case "edit" | "again" if turn:
                list(chat.edit(turn, text) if what == "edit" else chat.regenerate(turn))
                assert chat.current in turn.siblings and chat.current is turn.siblings[-1]
                said.append((turn.parent, chat.current))
            case "stop":
                stream = chat.ask(text)
                next(stream)
                stream.close()
                assert llm.cancelled and chat.current.finish_reason is None
                said.append((before, chat.current))
            case "early":
                chat.ask(text).close()
                assert chat.current is before
            case "fail":
                with pytest.raises(Exception, match="NaN"):
                    say(chat, "fault")
                assert chat.current is before
            case "undo":
                assert (chat.undo() is None) == (before is chat.root)
                assert chat.current is (before.parent or before)
            case "redo":
                assert chat.redo() == bool(before.children)
                assert chat.current is (before.chosen_child or before)
            case "switch" if turn:
                chat.switch_to(turn)
                assert turn in chat.turns and not chat.current.children
            case "clear":
                chat.clear()
                said = []
        turns = list(chat.root.descendants)
        assert {id(turn) for _, turn in said} == {id(turn) for turn in turns}
        assert all(turn.parent is parent for parent, turn in said)
        assert all(
            (turn.chosen_child in turn.children) if turn.children else not turn.chosen_child for turn in turns
        )
        assert all(turn in chat.root.branch_end.path or turn.parent for turn in chat.turns)
        assert len(chat.branches) == sum(not turn.children for turn in turns)
        assert [m["content"] for m in chat.messages[::2]] == [turn.question for turn in chat.turns]
    file = tmp_path_factory.mktemp("chats") / "one.json"
    session_file.write(file, SavedSession.from_chat(chat, "", 0, 0))
    back = Chat(FakeLLM())
    session_file.read(file).restore_into(back)
    assert tree(back.root) == tree(chat.root)
    assert back.messages == chat.messages
